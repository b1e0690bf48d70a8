"""The folder of a run: base_output_directory/run_name."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from trainer.config import UserError
from trainer.observe.metrics import METRICS_FILE
from trainer.runtime.agreement import from_first
from trainer.runtime.lock import lock

CONFIG_FILE, FINISHED_FILE = "config.yml", "finished"
_NUMBERED = re.compile(r"run-(\d+)")


class RunDir(NamedTuple):
    """A run's folder, which is this process's alone as long as `lock` is open; a context manager that closes it.

    Of several processes that train together the first has the lock, for all of them, and writes what is written.
    """

    path: Path
    lock: IO[str] | None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.lock is not None:
            self.lock.close()

    @property
    def finished(self) -> bool:
        """Whether an earlier process came to the end of this run."""
        return from_first((self.path / FINISHED_FILE).exists)

    def begin(self, config_yml: str, *, resumed: bool, say: Callable[[str], None]) -> None:
        """Leaves the first trace: config.yml. The run is unfinished from here on.

        Args:
          config_yml: the resolved configuration.
          resumed: the run goes on from a checkpoint of its own. If not, rows of metrics that lie here will be lost; a
            line to `say` tells so.

        Raises:
          UserError: those rows are of a run that ended, or that had no checkpoints; or the disk is full.
        """
        from_first(lambda: self._begin(config_yml, resumed, say))

    def _begin(self, config_yml: str, resumed: bool, say: Callable[[str], None]) -> None:
        config = self.path / CONFIG_FILE
        if not resumed and (self.path / METRICS_FILE).exists():
            without = config.is_file() and "enable_checkpointing: false" in config.read_text("utf-8").splitlines()
            if (self.path / FINISHED_FILE).exists() or without:
                raise UserError(
                    f"{self.path} holds the metrics of an earlier run and no checkpoint to go on from; choose another "
                    "run_name, or remove the folder"
                )
            say(f"{self.path} has no checkpoint yet: beginning again")
        temporary = self.path / f"{CONFIG_FILE}.tmp"
        try:
            (self.path / FINISHED_FILE).unlink(missing_ok=True)
            temporary.write_text(config_yml, encoding="utf-8")
            temporary.replace(config)
        except OSError as error:
            raise UserError(f"cannot write {config}: {error.strerror or error}; make room, and try again") from error

    def finish(self) -> None:
        """Notes that the run came to its end: an empty run_name does not go on with it."""
        from_first((self.path / FINISHED_FILE).touch)


def open_run(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    """Choose the run's folder, make it if it is new, and lock it. Of several processes the first does so for all.

    With a name given it is base_output_directory/run_name, and folders above it are made too. An empty `run_name` goes
    on with the newest numbered run (run-0001, run-0002, ...) whose config.yml is `config_yml`, which did not finish and
    which no live process holds; else it takes the next number. One line to `say` tells which.

    Args:
      config_yml: the resolved configuration, as it is to be written.
      resumes: runs can go on from checkpoints; if not, an empty name always takes the next number, and a name whose
        folder holds metrics is refused.

    Raises:
      UserError: the folder cannot be made or written, the name leaves `base_output_directory`, a live process holds the
        run, or it cannot be resumed.
    """
    opened: list[RunDir] = []

    def choose() -> str:
        opened.append(_open(base_output_directory, run_name, config_yml, resumes, say))
        return str(opened[0].path)

    path = from_first(choose)
    return opened[0] if opened else RunDir(Path(path), None)


def _open(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    base = Path(os.path.expanduser(base_output_directory))
    try:
        base.mkdir(parents=True, exist_ok=True)
        if run_name:
            run = _named(base, run_name, resumes)
        else:
            run = (resumes and _unfinished(base, config_yml, say)) or _numbered(base)
    except OSError as error:
        raise _unwritable(base_output_directory, error.strerror or str(error)) from error
    return run


def _unfinished(base: Path, config_yml: str, say: Callable[[str], None]) -> RunDir | None:
    for _, path in sorted(_numbers(base), reverse=True):
        # Looked at before it is locked, so that no run is kept from its own process, and again when it is ours.
        if _fits(path, config_yml) and (held := lock(path)):
            if _fits(path, config_yml):
                if (path / CONFIG_FILE).exists():
                    say(f"{path} has this configuration and is unfinished: going on with it")
                return RunDir(path, held)
            held.close()
    return None


def _fits(path: Path, config_yml: str) -> bool:
    """Whether a numbered run is unfinished and of this configuration, or ended before there was anything to lose."""
    config = path / CONFIG_FILE
    if config.is_file():
        return config.read_text("utf-8") == config_yml and not (path / FINISHED_FILE).exists()
    return path.is_dir() and not (path / METRICS_FILE).exists()


def _numbers(base: Path) -> list[tuple[int, Path]]:
    return [(int(match[1]), path) for path in base.iterdir() if (match := _NUMBERED.fullmatch(path.name))]


def _numbered(base: Path) -> RunDir:
    number = max((number for number, _ in _numbers(base)), default=0) + 1
    while True:
        path = base / f"run-{number:04}"
        # Of two processes at once one gets the number: the other finds the folder, or its lock, taken.
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            if held := lock(path):
                return RunDir(path, held)
        number += 1


def _named(base: Path, run_name: str, resumes: bool) -> RunDir:
    path = base / run_name
    if os.path.isabs(run_name) or os.path.normpath(run_name).split(os.sep)[0] in (".", ".."):
        raise UserError(
            f"run_name={run_name} is no folder within base_output_directory; give a name, or leave it empty"
        )
    if not resumes and (path / METRICS_FILE).exists():
        free = next(name for n in itertools.count(2) if not (base / (name := f"{run_name}-{n}")).exists())
        raise UserError(
            f"run_name={run_name}: {path} holds the metrics of an earlier run, and enable_checkpointing=false cannot "
            f"go on with it; choose another name or leave it empty for the next free number; nearest: {free}"
        )
    path.mkdir(parents=True, exist_ok=True)
    held = lock(path)
    if held is None:
        raise UserError(
            f"run_name={run_name}: another process is running in {path}; wait for it, or choose another name"
        )
    return RunDir(path, held)


def _unwritable(base_output_directory: str, why: str) -> UserError:
    return UserError(
        f"base_output_directory={base_output_directory}: cannot write there ({why}); give a folder that you can write"
    )

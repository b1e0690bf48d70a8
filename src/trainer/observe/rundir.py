"""The folder of a run: base_output_directory/run_name."""

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from trainer.config import UserError
from trainer.observe.metrics import METRICS_FILE
from trainer.runtime.agreement import agreed, from_first
from trainer.runtime.lock import LOCK_FILE, lock
from trainer.runtime.storage import entries, folder, is_remote, mirror, remedy

CONFIG_FILE, FINISHED_FILE, CHECKPOINTS = "config.yml", "finished", "checkpoints"
_FILES = (CONFIG_FILE, METRICS_FILE, FINISHED_FILE)
OWN_FILES = (*_FILES, LOCK_FILE)  # what a run writes into its folder itself, besides checkpoints
_NUMBERED = re.compile(r"run-(\d+)")


class RunDir(NamedTuple):
    """A run's folder, which is this process's alone as long as `lock` is open; a context manager that closes it.

    Of several processes that train together the first has the lock, for all of them, and writes what is written.

    Attributes:
      path: where files are written.
      remote: the run's folder in a bucket, to which they are copied; None for a run of this machine.
    """

    path: Path
    lock: IO[str] | None
    remote: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the folder up."""
        if self.lock is not None:
            self.lock.close()

    @property
    def place(self) -> Any:
        """Where the run lies for its user, and its checkpoints."""
        return self.path if self.remote is None else self.remote

    def upload(self) -> None:
        """Copies what this process wrote to the bucket, if the run lies in one. Raises UserError if it cannot."""
        if self.remote is not None and self.lock is not None:
            with _remote_errors(self.remote):
                for name in _FILES:
                    if (self.path / name).exists():
                        (self.remote / name).write_bytes((self.path / name).read_bytes())

    def _download(self) -> Self:
        """Makes the files of this machine those of the bucket."""
        if self.remote is not None:
            for name in _FILES:
                if (self.remote / name).exists():
                    (self.path / name).write_bytes((self.remote / name).read_bytes())
                else:
                    (self.path / name).unlink(missing_ok=True)
        return self

    @property
    def finished(self) -> bool:
        """Whether an earlier process came to the end of this run."""
        return from_first((self.path / FINISHED_FILE).exists)

    def begin(self, config_yml: str, *, resumed: bool, say: Callable[[str], None]) -> None:
        """Leaves the first trace: config.yml. The run is unfinished from here on.

        Args:
          config_yml: the resolved configuration.
          resumed: the run goes on from a checkpoint of its own.
          say: is told what becomes of rows of metrics that lie here although no checkpoint covers them. Those of a run
            without checkpoints are kept beside. Those of a run that ended before its first checkpoint come again.

        Raises:
          UserError: those rows are of a run that ended, and whose checkpoints are gone; or the disk is full.
        """
        from_first(lambda: self._begin(config_yml, resumed, say))

    def _begin(self, config_yml: str, resumed: bool, say: Callable[[str], None]) -> None:
        config = self.path / CONFIG_FILE
        with _writing(config):
            if not (self.path / METRICS_FILE).exists():
                if resumed:
                    say(f"{self.place / METRICS_FILE} is gone: the rows of earlier steps are missing in the new one")
            elif not resumed:
                self._make_way(config_yml, say)
            temporary = self.path / f"{CONFIG_FILE}.tmp"
            (self.path / FINISHED_FILE).unlink(missing_ok=True)
            temporary.write_text(config_yml, encoding="utf-8")
            temporary.replace(config)
        if self.remote is not None:
            with _remote_errors(self.remote):
                (self.remote / FINISHED_FILE).unlink(missing_ok=True)
            self.upload()

    def _make_way(self, config_yml: str, say: Callable[[str], None]) -> None:
        """Keeps the metrics of an earlier run, unless this one will write them again."""
        config = self.path / CONFIG_FILE
        earlier = config.read_text("utf-8") if config.is_file() else ""
        if _without_checkpoints(earlier) or _without_checkpoints(config_yml):
            self._keep_beside(say)
        elif (self.path / FINISHED_FILE).exists():
            raise UserError(
                f"{self.place} holds the metrics of an earlier run that ended, and its checkpoints are gone; choose "
                "another run_name, or remove the folder"
            )
        else:
            say(f"{self.place} has no checkpoint yet: beginning again")

    def _keep_beside(self, say: Callable[[str], None]) -> None:
        taken = {path.name for path in entries(self.place)}
        kept = [METRICS_FILE, *([CONFIG_FILE] if (self.path / CONFIG_FILE).is_file() else [])]
        number = next(n for n in itertools.count(1) if taken.isdisjoint(_numbered_file(name, n) for name in kept))
        # The metrics go last: as long as they are here, a process that is started again keeps all of it once more.
        if self.remote is not None:
            for name in kept:
                (self.remote / _numbered_file(name, number)).write_bytes((self.path / name).read_bytes())
            (self.remote / METRICS_FILE).unlink(missing_ok=True)
        for name in kept[1:]:
            shutil.copyfile(self.path / name, self.path / _numbered_file(name, number))
        (self.path / METRICS_FILE).rename(self.path / _numbered_file(METRICS_FILE, number))
        names = " and ".join(_numbered_file(name, number) for name in kept)
        say(f"{self.place} holds an earlier run whose checkpoints are not here: kept beside as {names}")

    def finish(self) -> None:
        """Notes that the run came to its end: an empty run_name does not go on with it."""
        from_first(self._finish)
        self.upload()

    def _finish(self) -> None:
        with _writing(self.path / FINISHED_FILE):
            (self.path / FINISHED_FILE).touch()


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
        folder holds checkpoints is refused.

    Raises:
      UserError: the folder cannot be made or written, the name leaves `base_output_directory`, a live process holds the
        run, or it cannot be resumed.
    """
    opened: list[RunDir] = []

    def choose() -> list[str]:
        opened.append(_open(base_output_directory, run_name, config_yml, resumes, say))
        path, place = str(opened[0].path.absolute()), str(opened[0].place)
        return [path, place if is_remote(opened[0].place) else path]

    path, place = from_first(choose)

    def seen() -> None:
        if place == path and not Path(path, LOCK_FILE).exists():
            raise UserError(
                f"{path} was made by process 0, and this process does not see it: base_output_directory must be a "
                "folder that all processes share, or a bucket"
            )

    agreed(seen)
    return opened[0] if opened else RunDir(Path(path), None, None if place == path else folder(place))


def _open(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    base = folder(base_output_directory)
    try:
        with _remote_errors(base):
            if not is_remote(base):
                base.mkdir(parents=True, exist_ok=True)
            if run_name:
                return _named(base, run_name, resumes)
            return (resumes and _unfinished(base, config_yml, say)) or _numbered(base)
    except OSError as error:
        raise _unwritable(base_output_directory, error.strerror or str(error)) from error


def _locked(path: Any) -> RunDir | None:
    """The run whose folder is `path`, if no live process has it."""
    if not is_remote(path):
        held = lock(path)
        return None if held is None else RunDir(path, held)
    local = mirror(path)
    local.mkdir(parents=True, exist_ok=True)
    held = lock(local)
    return None if held is None else RunDir(local, held, path)._download()


def _unfinished(base: Any, config_yml: str, say: Callable[[str], None]) -> RunDir | None:
    for _, path in sorted(_numbers(base), reverse=True):
        # Looked at before it is locked, so that no run is kept from its own process, and again when it is ours.
        if _fits(path, config_yml) and (run := _locked(path)):
            if _fits(path, config_yml):
                if (path / CONFIG_FILE).exists():
                    say(f"{path} has this configuration and is unfinished: going on with it")
                return run
            run.close()
    return None


def _fits(path: Any, config_yml: str) -> bool:
    """Whether a numbered run is unfinished and of this configuration, or ended before there was anything to lose."""
    config = path / CONFIG_FILE
    if config.is_file():
        return config.read_text("utf-8") == config_yml and not (path / FINISHED_FILE).exists()
    return path.is_dir() and not (path / METRICS_FILE).exists()


def _numbers(base: Any) -> list[tuple[int, Any]]:
    return [(int(match[1]), path) for path in entries(base) if (match := _NUMBERED.fullmatch(path.name))]


def _numbered(base: Any) -> RunDir:
    number = max((number for number, _ in _numbers(base)), default=0) + 1
    while True:
        path = base / f"run-{number:04}"
        # Of two processes at once one gets the number: the other finds the folder, or its lock, taken.
        with contextlib.suppress(FileExistsError):
            if not is_remote(path):
                path.mkdir()
            if run := _locked(path):
                return run
        number += 1


def _named(base: Any, run_name: str, resumes: bool) -> RunDir:
    path = base / run_name
    if os.path.isabs(run_name) or os.path.normpath(run_name).split(os.sep)[0] in (".", ".."):
        raise UserError(
            f"run_name={run_name} is no folder within base_output_directory; give a name, or leave it empty"
        )
    if not resumes and any(entry.name.isdecimal() for entry in entries(path / CHECKPOINTS)):
        free = next(name for n in itertools.count(2) if not (base / (name := f"{run_name}-{n}")).exists())
        raise UserError(
            f"run_name={run_name}: {path} holds a run with checkpoints, and enable_checkpointing=false cannot go on "
            f"with it; choose another name or leave it empty for the next free number; nearest: {free}"
        )
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)
    run = _locked(path)
    if run is None:
        raise UserError(
            f"run_name={run_name}: another process is running in {path}; wait for it, or choose another name"
        )
    return run


@contextlib.contextmanager
def _remote_errors(path: Any) -> Iterator[None]:
    """Makes what a bucket does not allow or cannot be asked a UserError; other errors pass."""
    try:
        yield
    except OSError as error:
        if not is_remote(path):
            raise
        raise UserError(f"{path}: the bucket cannot be read or written: {error}") from error


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; {remedy(error.errno)}") from error


def _without_checkpoints(config_yml: str) -> bool:
    return "enable_checkpointing: false" in config_yml.splitlines()


def _numbered_file(name: str, number: int) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{number}.{ending}"


def _unwritable(base_output_directory: str, why: str) -> UserError:
    return UserError(
        f"base_output_directory={base_output_directory}: cannot write there ({why}); give a folder that you can write"
    )

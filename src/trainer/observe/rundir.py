"""The folder of a run: base_output_directory/run_name."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from trainer.config import UserError
from trainer.observe.metrics import METRICS_FILE
from trainer.runtime.lock import lock

CONFIG_FILE, FINISHED_FILE = "config.yml", "finished"
_NUMBERED = re.compile(r"run-(\d+)")


class RunDir(NamedTuple):
    """A run's folder, which is this process's alone as long as `lock` is open."""

    path: Path
    lock: IO[str]

    def begin(self, config_yml: str) -> None:
        """Leaves the first trace: config.yml. The run is unfinished from here on."""
        (self.path / FINISHED_FILE).unlink(missing_ok=True)
        temporary = self.path / f"{CONFIG_FILE}.tmp"
        temporary.write_text(config_yml, encoding="utf-8")
        temporary.replace(self.path / CONFIG_FILE)

    def finish(self) -> None:
        """Notes that the run came to its end: an empty run_name does not go on with it."""
        (self.path / FINISHED_FILE).touch()


def open_run(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    """Choose the run's folder, make it if it is new, and lock it.

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
        if (path / FINISHED_FILE).exists():
            continue
        config = path / CONFIG_FILE
        begun = config.is_file()  # if not, a process ended before there was anything to lose
        if (not begun or config.read_text("utf-8") == config_yml) and (held := lock(path)):
            if begun:
                say(f"{path} has this configuration and is unfinished: going on with it")
            return RunDir(path, held)
    return None


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

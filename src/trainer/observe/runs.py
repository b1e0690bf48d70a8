"""Selects the folder of a run: the folder with the given name, an unfinished run's folder, or a new numbered folder."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.observe.metrics import METRICS_FILE
from trainer.observe.rundir import (
    CHECKPOINTS,
    CONFIG_FILE,
    FINISHED_FILE,
    STARTS_OVER,
    RunDir,
    check_rows,
    keeps_earlier,
    remote_errors,
)
from trainer.runtime.agreement import agreed, from_first
from trainer.runtime.folders import check_folder
from trainer.runtime.lease import is_held, owner_of, take
from trainer.runtime.lock import LOCK_FILE, is_locked, lock
from trainer.runtime.storage import entries, folder, is_remote, mirror, why_not_writable

_NUMBERED = re.compile(r"run-(\d+)")


def open_run(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    """Chooses the run's folder, creates it if it is new, and takes its lease. Process 0 does this for all processes.

    If `run_name` is given, the folder is base_output_directory/run_name; parent folders are also created. An empty
    `run_name` resumes the newest numbered run (run-0001, run-0002, ...) that is unfinished, has no live owner, and has
    a config.yml equal to `config_yml`. If there is no such run, a folder with the next number is created.

    Args:
      config_yml: the resolved configuration, as it will be written.
      resumes: whether runs save checkpoints to resume from. If not, an empty name always selects the next number, and a
        name whose folder contains checkpoints is an error.
      say: called with a line if an empty name resumes a run, and while waiting to see whether a run's owner is alive.

    Raises:
      UserError: the folder cannot be created or written, the name is outside `base_output_directory`, a live process
        owns the run, or the run cannot be resumed.
    """
    opened: list[RunDir] = []

    def choose() -> list[str]:
        opened.append(_open(base_output_directory, run_name, config_yml, resumes, say))
        path, run_folder = str(opened[0].path.absolute()), str(opened[0].folder)
        return [path, run_folder if is_remote(opened[0].folder) else path]

    path, run_folder = from_first(choose)

    def check_shared() -> None:
        if run_folder == path and not Path(path, LOCK_FILE).exists():
            raise UserError(
                f"process 0 created {path}, but this process cannot see it: base_output_directory must be a folder "
                "that all processes share, or a bucket"
            )

    agreed(check_shared)
    return opened[0] if opened else RunDir(Path(path), None, None if run_folder == path else folder(run_folder))


def expected_run(
    base_output_directory: str,
    run_name: str,
    config_yml: str,
    resumes: bool,
    say: Callable[[str], None] = lambda line: None,
) -> Any:
    """Returns the folder that `open_run` would choose with the same arguments. Creates nothing and keeps no lease.

    Raises:
      UserError: as for `open_run`, except that write access to a bucket is not tested, and a local folder is tested
        only by its permissions.
    """
    base = folder(base_output_directory)
    if run_name:
        path = _place_of(base, run_name, resumes)
        if _in_use(path, say):
            raise _in_use_by_another(path, run_name)
    else:
        numbers = sorted(_numbers(base), reverse=True)
        fitting = (path for _, path in numbers if resumes and _fits(path, config_yml) and not _in_use(path, say))
        path = next(fitting, base / _name(numbers[0][0] + 1 if numbers else 1))
    _check_writable(path, base_output_directory)
    return path


def _check_writable(path: Any, base_output_directory: str) -> None:
    if not is_remote(path) and (why := why_not_writable(path)):
        raise _unwritable(base_output_directory, why)


def check_earlier(run_folder: Any, config_yml: str, step: int, resumed: bool, say: Callable[[str], None]) -> None:
    """Reports what `RunDir.begin` would do with the metrics of an earlier process, and raises the same errors."""
    kept = False
    if not resumed and (run_folder / METRICS_FILE).exists():
        kept = keeps_earlier(run_folder, run_folder, config_yml)
        say(
            f"{run_folder} holds an earlier run: its files would be kept under other names"
            if kept
            else STARTS_OVER.format(run_folder)
        )
    if not kept:
        check_rows(run_folder, run_folder, step, say)


def _in_use(path: Any, say: Callable[[str], None]) -> bool:
    """Returns whether a live process owns the run in `path`."""
    check_folder(path)
    try:
        with remote_errors(path):
            return is_locked(mirror(path) if is_remote(path) else path) or is_held(path, say)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}; remove it") from error


def runs_to_resume(base_output_directory: str, run_name: str) -> list[Any]:
    """Returns the folders of the unfinished numbered runs, which a command without a run_name may resume, the newest
    first. If `run_name` is given, returns only its folder, which need not exist.

    Raises:
      UserError: the name is outside `base_output_directory`.
    """
    base = folder(base_output_directory)
    if run_name:
        return [_place_of(base, run_name, True)]
    return [path for _, path in sorted(_numbers(base), reverse=True) if not (path / FINISHED_FILE).exists()]


def _open(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    base = folder(base_output_directory)
    _check_writable(base, base_output_directory)
    try:
        with remote_errors(base):
            if not is_remote(base):
                base.mkdir(parents=True, exist_ok=True)
            if run_name:
                return _named(base, run_name, resumes, say)
            return (resumes and _unfinished(base, config_yml, say)) or _numbered(base, say)
    except OSError as error:
        raise _unwritable(base_output_directory, error.strerror or str(error)) from error


def _taken(path: Any, say: Callable[[str], None]) -> RunDir | None:
    """Takes over the run in the folder `path`; returns None if a live process owns it."""
    local, remote = (mirror(path), path) if is_remote(path) else (path, None)
    local.mkdir(parents=True, exist_ok=True)
    check_folder(path)
    held = lock(local)
    lease = None if held is None else take(path, held, say)
    if lease is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(lease.close)
        run = RunDir(local, lease, remote).download()
        stack.pop_all()
    return run


def _unfinished(base: Any, config_yml: str, say: Callable[[str], None]) -> RunDir | None:
    for _, path in sorted(_numbers(base), reverse=True):
        # Checks the run before taking its lease: even if the run does not fit, taking its lease would lock out another
        # process that resumes it. Checks again under the lease, because the run may have changed.
        if _fits(path, config_yml) and (run := _taken(path, say)):
            if _fits(path, config_yml):
                if (path / CONFIG_FILE).exists():
                    say(f"{path} has this configuration and is unfinished: resuming it")
                return run
            run.close()
    return None


def _fits(path: Any, config_yml: str) -> bool:
    """Returns whether a numbered run is unfinished and has this configuration, or ended before it wrote anything."""
    config = path / CONFIG_FILE
    if config.is_file():
        return config.read_bytes().decode("utf-8", "replace") == config_yml and not (path / FINISHED_FILE).exists()
    return path.is_dir() and not (path / METRICS_FILE).exists()


def _numbers(base: Any) -> list[tuple[int, Any]]:
    return [(int(match[1]), path) for path in entries(base) if (match := _NUMBERED.fullmatch(path.name))]


def _numbered(base: Any, say: Callable[[str], None]) -> RunDir:
    number = max((number for number, _ in _numbers(base)), default=0) + 1
    while True:
        path = base / _name(number)
        # If two processes race for a number, the loser finds that the folder exists or already has an owner.
        with contextlib.suppress(FileExistsError):
            if not is_remote(path):
                path.mkdir()
            if run := _taken(path, say):
                return run
        number += 1


def _name(number: int) -> str:
    return f"run-{number:04}"


def _place_of(base: Any, run_name: str, resumes: bool) -> Any:
    """Returns the folder of the run `run_name`. Raises UserError if the name is invalid or the run in this folder
    cannot be resumed."""
    path = base / run_name
    if os.path.isabs(run_name) or os.path.normpath(run_name).split(os.sep)[0] in (".", ".."):
        raise UserError(
            f"run_name={run_name} is not a folder within base_output_directory; give a name, or leave it empty"
        )
    if not resumes and any(entry.name.isdecimal() for entry in entries(path / CHECKPOINTS)):
        free = next(name for n in itertools.count(2) if not (base / (name := f"{run_name}-{n}")).exists())
        raise UserError(
            f"run_name={run_name}: {path} holds a run with checkpoints, and enable_checkpointing=false cannot resume "
            f"it; choose another name or leave it empty for the next free number; nearest: {free}"
        )
    return path


def _named(base: Any, run_name: str, resumes: bool, say: Callable[[str], None]) -> RunDir:
    path = _place_of(base, run_name, resumes)
    run = _taken(path, say)
    if run is None:
        raise _in_use_by_another(path, run_name)
    return run


def _in_use_by_another(path: Any, run_name: str) -> UserError:
    with remote_errors(path):
        owner = owner_of(path)
    return UserError(
        f"run_name={run_name}: {owner} is running in {path}; wait for it or end it, or choose another name"
    )


def _unwritable(base_output_directory: str, why: str) -> UserError:
    return UserError(
        f"base_output_directory={base_output_directory}: cannot write there ({why}); choose a writable folder"
    )

"""The folder of a run: base_output_directory/run_name."""

import itertools
import os
import re
from pathlib import Path

from trainer.config import UserError
from trainer.observe.metrics import METRICS_FILE

_NUMBERED = re.compile(r"run-(\d+)")


def open_run(base_output_directory: str, run_name: str) -> Path:
    """Make the run's folder and return it; nothing is written into it.

    An empty `run_name` takes the number after the highest one there (run-0001, run-0002, ...), also when several
    processes begin runs at once. With a name given, folders above the run's own are made too.

    Raises:
      UserError: the folder cannot be made or written, the name leaves `base_output_directory`, or the named run has
        metrics already.
    """
    if "://" in base_output_directory:
        raise UserError(
            f"base_output_directory={base_output_directory}: remote folders are not supported; give a local one"
        )
    base = Path(os.path.expanduser(base_output_directory))
    try:
        base.mkdir(parents=True, exist_ok=True)
        run_dir = _named(base, run_name) if run_name else _numbered(base)
    except OSError as error:
        raise _unwritable(base_output_directory, error.strerror or str(error)) from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise _unwritable(base_output_directory, f"no permission to write in {run_dir}")
    return run_dir


def _numbered(base: Path) -> Path:
    numbers = [int(match[1]) for path in base.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        run_dir = base / f"run-{number:04}"
        try:
            run_dir.mkdir()  # fails where it exists, so that of two processes one gets the number
        except FileExistsError:
            number += 1
        else:
            return run_dir


def _named(base: Path, run_name: str) -> Path:
    run_dir = base / run_name
    if os.path.isabs(run_name) or os.path.normpath(run_name).split(os.sep)[0] in (".", ".."):
        raise UserError(
            f"run_name={run_name} is no folder within base_output_directory; give a name, or leave it empty"
        )
    if (run_dir / METRICS_FILE).exists():
        free = next(name for n in itertools.count(2) if not (base / (name := f"{run_name}-{n}")).exists())
        raise UserError(
            f"run_name={run_name}: {run_dir} holds the metrics of an earlier run, which cannot be resumed; "
            f"choose another name or leave it empty for the next free number; nearest: {free}"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _unwritable(base_output_directory: str, why: str) -> UserError:
    return UserError(
        f"base_output_directory={base_output_directory}: cannot write there ({why}); give a folder that you can write"
    )

"""Errors of the checkpoint folder: a write test before training, and one message for each failure."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from trainer.config import UserError
from trainer.runtime.storage import is_remote, remedy, remove_tree

EXPIRED = ".expired"  # ends the name of a folder that may be removed at any time
_ORBAX = "/orbax/"  # in the paths of its files; others use its logger too
_BLOCK = 4096  # bytes; a full disk still takes an empty file


@contextlib.contextmanager
def disk_errors(directory: Any) -> Iterator[None]:
    """Makes a full or unwritable disk a UserError. Those of TensorStore are ValueErrors with the system's code."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if not _of_disk(error):
            raise
        raise UserError(
            f"cannot write a checkpoint below {directory}: {_reason(error)}; the checkpoints that are committed there "
            f"are intact: {remedy(_code(error))} and run the same command again"
        ) from error


@contextlib.contextmanager
def read_errors(directory: Any) -> Iterator[None]:
    """Makes a folder of checkpoints that cannot be read a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoints below {directory}: {_reason(error)}; make the folder readable, or check the "
            "disk or the connection to it, and run the same command again"
        ) from error


def check_writable(directory: Any, process: int) -> None:
    """Makes the folder of checkpoints, and writes and removes a file in it.

    Args:
      directory: the folder, of this machine or of a bucket.
      process: the index of this process. Each process uses a name of its own.

    Raises:
      UserError: the file cannot be written, so no save could succeed.
    """
    trial = directory / f"trial-{process}{EXPIRED}"
    try:
        trial.parent.mkdir(parents=True, exist_ok=True)
        if not is_remote(trial) and trial.exists():
            remove_tree(trial)  # a process was killed here
        trial.mkdir(exist_ok=True)
        (trial / "file").write_bytes(bytes(_BLOCK))
        remove_tree(trial)
    except OSError as error:
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise UserError(
                f"{directory} is not a folder, but checkpoints are saved below it; rename or remove it, or choose "
                "another run_name"
            ) from error
        raise UserError(
            f"cannot write checkpoints below {directory}: {_reason(error)}; {remedy(_code(error))} and run the same "
            "command again, or set enable_checkpointing=false to train without checkpoints"
        ) from error


def _of_disk(error: Exception) -> bool:
    return isinstance(error, OSError) or (isinstance(error, ValueError) and "os_error_code" in str(error))


def _code(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def _reason(error: Exception) -> str:
    code = _code(error)
    return str(error).partition("\n")[0] if code is None else os.strerror(code)


class _Log(logging.Filter):
    """Drops Orbax's log messages below CRITICAL, and keeps the first error among them that is of the disk or that Orbax
    itself raised."""

    error: Exception | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:  # absl's logger is that of other libraries too
            return True
        error = record.exc_info[1] if record.exc_info else None
        if self.error is None and isinstance(error, Exception) and (_of_disk(error) or _ORBAX in record.pathname):
            self.error = error
        return record.levelno >= logging.CRITICAL


_LOG = _Log()


def silence_orbax() -> None:
    """Keeps Orbax from also printing a traceback of the exception that it raises."""
    logger = logging.getLogger("absl")
    logger.addFilter(_LOG)  # a second time it does nothing
    logger.setLevel(logging.ERROR)
    _ignore_closed_loops()


def forget_failures() -> None:
    """Call it before a save; see `logged_failure`."""
    _LOG.error = None


def logged_failure() -> Exception | None:
    """An error in the current save, if a thread of Orbax logged one.

    Of several processes the save raises it much later: other threads first wait, for up to 20 minutes, for processes
    that wait for what the failed thread was to write.
    """
    return _LOG.error


@functools.cache
def _ignore_closed_loops() -> None:
    """When a part of a save fails, Orbax closes the event loop of the other parts, which then fail in TensorStore's
    threads, where it cannot be caught."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook

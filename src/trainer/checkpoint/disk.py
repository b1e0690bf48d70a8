"""Handles disk errors in the checkpoint folder: tests the folder before training, and converts errors to messages."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from trainer.config.errors import UserError
from trainer.runtime.agreement import lost_process
from trainer.runtime.storage import is_remote, remedy, remove_tree

EXPIRED = ".expired"  # suffix of a folder that may be removed at any time
_ORBAX = "/orbax/"  # part of the paths of Orbax's source files
_BLOCK = 4096  # size of the test file in bytes; not 0, because a full disk accepts empty files


@contextlib.contextmanager
def disk_errors(directory: Any, before: int | None = None) -> Iterator[None]:
    """Converts errors of a full or unwritable disk to UserError. TensorStore raises such errors as ValueError with the
    system's error code. Errors caused by the loss of another process are not converted.

    `before`: the folder's `identity` when the run began. If the identity has changed, every error is converted to the
    error that `moved` returns.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if before is not None and identity(directory) != before and not lost_process(error):
            raise moved(directory) from error
        if not _of_disk(error) or lost_process(error):
            raise
        raise UserError(
            f"cannot write a checkpoint below {directory}: {_reason(error)}; the checkpoints that are committed there "
            f"are intact: {remedy(_code(error))} and run the same command again"
        ) from error


def identity(directory: Any) -> int | None:
    """Returns a number that identifies a folder on this machine, even after it is renamed. Returns None if the folder
    does not exist or is in a bucket."""
    return directory.stat().st_ino if not is_remote(directory) and directory.is_dir() else None


def moved(directory: Any) -> UserError:
    """Returns the error for a folder of checkpoints that was moved or replaced during the run."""
    return UserError(
        f"{directory} was renamed, removed or replaced while the run wrote checkpoints there: remove any new folder "
        "that has the name of the run's folder, give the run's folder its name back, and run the same command again"
    )


@contextlib.contextmanager
def read_errors(directory: Any) -> Iterator[None]:
    """Converts errors of an unreadable folder of checkpoints to UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read the checkpoints below {directory}: {_reason(error)}; make the folder readable, or check the "
            "disk or the connection to it, and run the same command again"
        ) from error


def check_writable(directory: Any, process: int) -> None:
    """Creates the folder of checkpoints, and writes and removes a test file in it.

    Args:
      directory: the folder, on this machine or in a bucket.
      process: the index of this process. Each process uses a separate file name.

    Raises:
      UserError: the test file cannot be written, so no save could succeed.
    """
    trial = directory / f"trial-{process}{EXPIRED}"
    try:
        trial.parent.mkdir(parents=True, exist_ok=True)
        if not is_remote(trial) and trial.exists():
            remove_tree(trial)  # left by an earlier process that was killed during this test
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
    """Drops Orbax's log messages below CRITICAL. Keeps the first logged exception that is a disk error or comes
    from Orbax."""

    error: Exception | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:  # other libraries use absl's logger, too
            return True
        error = record.exc_info[1] if record.exc_info else None
        if self.error is None and isinstance(error, Exception) and (_of_disk(error) or _ORBAX in record.pathname):
            self.error = error
        return record.levelno >= logging.CRITICAL


_LOG = _Log()


def silence_orbax() -> None:
    """Prevents Orbax from logging the tracebacks of exceptions that it also raises."""
    logger = logging.getLogger("absl")
    logger.addFilter(_LOG)  # adding it again has no effect
    logger.setLevel(logging.ERROR)
    _ignore_closed_loops()


def forget_failures() -> None:
    """Forgets earlier failures. Call it before a save; see `logged_failure`."""
    _LOG.error = None


def logged_failure() -> Exception | None:
    """Returns the first error that a thread of Orbax logged during the current save; None if there is none.

    With several processes, it may take 20 minutes until the save itself raises this error: the save's other threads
    wait for other processes, which wait for the failed thread.
    """
    return _LOG.error


@functools.cache
def _ignore_closed_loops() -> None:
    """Silences errors in TensorStore's threads after a failed save.

    When one part of a save fails, Orbax closes the event loop of the other parts. The other parts then fail in
    TensorStore's threads, where their errors cannot be caught.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook

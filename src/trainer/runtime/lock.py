"""File locks. Only one process at a time can lock a folder."""

import fcntl
from pathlib import Path
from typing import IO

from trainer.runtime.folders import appended, not_through_a_link

LOCK_FILE = ".lock"


def lock(folder: Path) -> IO[bytes] | None:
    """Locks the folder for this process, with a lock file in the folder; see `lock_file`."""
    return lock_file(folder / LOCK_FILE)


def lock_file(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Locks the file for this process, until the returned file is closed or the process ends.

    If another live process holds the lock, returns None or, with `wait`, waits for that process. The lock file is never
    deleted: otherwise, two processes could lock different files of the same name.
    """
    file = appended(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(folder: Path) -> bool:
    """Returns whether a live process holds the lock of the folder; False if the folder does not exist."""
    try:
        with open(folder / LOCK_FILE, encoding="utf-8", opener=not_through_a_link) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False

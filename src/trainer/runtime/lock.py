"""A lock that only one process can hold on a folder."""

import fcntl
from pathlib import Path
from typing import IO

from trainer.runtime.folders import appended, not_through_a_link

LOCK_FILE = ".lock"


def lock(folder: Path) -> IO[bytes] | None:
    """Locks the folder for this process. The lock is held until the returned file is closed or the process ends.

    Returns None if another live process holds the lock. The lock file is never deleted.
    """
    file = appended(folder / LOCK_FILE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_locked(folder: Path) -> bool:
    """Returns whether a live process holds the lock on the folder. Changes nothing in the folder, which may not
    exist."""
    try:
        with open(folder / LOCK_FILE, encoding="utf-8", opener=not_through_a_link) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False

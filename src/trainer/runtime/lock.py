"""One process at a time in a folder."""

import fcntl
from pathlib import Path
from typing import IO

LOCK_FILE = ".lock"


def lock(folder: Path) -> IO[str] | None:
    """Takes the folder for this process: an open file that holds the lock until it is closed or the process ends.

    None where another live process has it. The file stays behind; a lock of a process that died is free.
    """
    file = (folder / LOCK_FILE).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file

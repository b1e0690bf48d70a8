"""Folders of this machine and of buckets (gs://), by one set of functions.

A folder of a bucket is an `etils.epath.Path`, which has pathlib's methods as far as they are used here. A bucket has no
folders without files and no rename of one: what must happen at once is the writing of a single file.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from trainer.config import NotBuilt, UserError
from trainer.config.paths import local_path

# Orbax writes it into a folder of a bucket as its last act: what has it is whole.
COMMITTED = "commit_success.txt"


def folder(text: str) -> Any:
    """The path that a user means by `text`: a pathlib.Path, or that of a bucket.

    Raises:
      UserError: it is remote and no gs://, or the package for it is missing.
    """
    if "://" not in text:
        return local_path(text)
    if not text.startswith("gs://"):
        raise NotBuilt(f"{text}: of remote paths only gs:// is built")
    from etils import epath

    path = epath.Path(text)
    try:
        path.exists()
    except ImportError as error:
        raise UserError(f"{text}: buckets need a package that is missing: pip install 'trainer[gcs]'") from error
    return path


def is_remote(path: Any) -> bool:
    """Whether a path is in a bucket."""
    return "://" in os.fspath(path)


def absolute(path: Any) -> Any:
    """The path from the root; one in a bucket is."""
    return path if is_remote(path) else path.absolute()


def entries(path: Any) -> list[Any]:
    """What lies in a folder, by name; [] where there is no such folder."""
    return sorted(path.iterdir()) if path.is_dir() else []


def files_below(path: Any) -> list[str]:
    """The files of a folder and of those in it, by their paths from there."""
    found = []
    for entry in entries(path):
        found += [f"{entry.name}/{name}" for name in files_below(entry)] if entry.is_dir() else [entry.name]
    return found


def size(path: Any) -> int:
    """Bytes of a file; raises OSError where there is none."""
    return path.stat().length if is_remote(path) else path.stat().st_size


def remove_tree(path: Any) -> None:
    """Removes a folder and what is in it; of this machine also a file."""
    if is_remote(path):
        path.rmtree()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def remedy(code: int | None) -> str:
    """What a user can do about a folder that was not written, by the system's error code."""
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable"
    return "check the disk or the connection to it"


def user_cache() -> Path:
    """The trainer's folder in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"


def mirror(path: Any) -> Path:
    """The folder of this machine in which files of a bucket's folder are written before they are copied there."""
    return user_cache() / "buckets" / os.fspath(path).replace("://", "/")

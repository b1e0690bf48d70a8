"""Functions for folders that are either local or in a bucket (gs://).

A folder in a bucket is an `etils.epath.Path`, which has the pathlib methods that are used here. In a bucket, empty
folders do not exist, folders cannot be renamed, and only the write of a single file is atomic.
"""

import errno
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

from trainer.config.errors import NotBuilt, UserError
from trainer.config.paths import local_path

# Orbax writes this file last when it saves to a bucket, so a folder with this file is complete.
COMMITTED = "commit_success.txt"


def folder(text: str) -> Any:
    """Converts `text` to a path: a pathlib.Path, or an `etils.epath.Path` for a bucket.

    Raises:
      UserError: the path is remote but not gs://, or the package for buckets is missing.
    """
    if "://" not in text:
        return local_path(text)
    if not text.startswith("gs://"):
        raise NotBuilt(f"{text}: only gs:// is supported for remote paths")
    from etils import epath

    path = epath.Path(text)
    try:
        path.exists()
    except ImportError as error:
        raise UserError(f"{text}: a package for buckets is missing: pip install 'trainer[gcs]'") from error
    return path


def is_remote(path: Any) -> bool:
    """Returns whether a path is in a bucket."""
    return "://" in os.fspath(path)


def absolute(path: Any) -> Any:
    """Returns the absolute path. A path in a bucket is already absolute."""
    return path if is_remote(path) else path.absolute()


def entries(path: Any) -> list[Any]:
    """Returns the entries of a folder, sorted; [] if the folder does not exist."""
    return sorted(path.iterdir()) if path.is_dir() else []


def files_below(path: Any) -> list[str]:
    """Returns all files below a folder, as paths relative to it."""
    names = []
    for entry in entries(path):
        names += [f"{entry.name}/{name}" for name in files_below(entry)] if entry.is_dir() else [entry.name]
    return names


def size(path: Any) -> int:
    """Returns the size of a file in bytes; raises OSError if it does not exist."""
    return path.stat().length if is_remote(path) else path.stat().st_size


def read_now(path: Any, most: int) -> bytes:
    """Returns the current content of a small file, up to `most` bytes, even if another machine has just written the
    file.

    An ordinary read from a bucket may return outdated content, because of cached listings.

    Raises:
      OSError: the file cannot be read.
    """
    if is_remote(path) and importlib.util.find_spec("gcsfs") is not None:
        import fsspec

        return fsspec.filesystem("gcs").cat_file(os.fspath(path), end=most)
    with path.open("rb") as file:
        return file.read(most)


def remove_tree(path: Any) -> None:
    """Removes a folder with its contents, or a local file."""
    if is_remote(path):
        path.rmtree()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def why_not_writable(path: Path) -> str | None:
    """Returns why the folder `path` cannot be written, or created with its missing parents; None if it can."""
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not existing.is_dir():
        return os.strerror(errno.ENOTDIR)
    return None if os.access(existing, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def remedy(code: int | None) -> str:
    """Returns advice for the user about a failed write with the error number `code`."""
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free disk space"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable"
    return "check the disk or its connection"


def user_cache() -> Path:
    """Returns the trainer's folder within the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"


def mirror(path: Any) -> Path:
    """Returns the local folder for files that are later copied to `path`, a folder in a bucket."""
    return user_cache() / "buckets" / os.fspath(path).replace("://", "/")

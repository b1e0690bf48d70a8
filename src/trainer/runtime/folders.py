"""Safe access to folders that are given to a command. They are untrusted, because they may come from someone else.

A symbolic link in an untrusted folder could make a command read, publish or overwrite any of the user's files. A pipe
or a device could block the command forever. So a folder is checked before it is read, and writes do not follow links.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.config.limits import FILE_BYTES
from trainer.runtime.storage import entries, is_remote

_UNFINISHED = re.compile(r".+\.([0-9]+)\.tmp")  # the name of a file that is being written


def check_folder(folder: Any, names: Iterable[str] = (".",)) -> None:
    """Checks that everything in `folder` is a regular file, a folder, or a link to a file or folder in `folder`.

    In a snapshot of Hugging Face's cache (models--NAME/snapshots/REVISION), links may lead to the cache's blobs.

    Args:
      folder: the folder; one in a bucket is always accepted, because buckets have no links.
      names: the paths in `folder` to check, recursively; paths that do not exist are ignored.

    Raises:
      UserError: a link or file is not allowed; the message names it.
    """
    if is_remote(folder):
        return
    roots = _roots(folder)
    pending = [folder / name for name in names]
    visited = set()
    while pending:
        path = pending.pop()
        if not os.path.lexists(path):
            continue
        real = os.path.realpath(path)
        if not any(Path(real).is_relative_to(root) for root in roots):
            raise UserError(
                f"{path} leads out of {folder}, to {real}: such a link is not followed; replace it by a copy of its "
                f"target, or give the target {'folder' if os.path.isdir(real) else 'file'} itself"
            )
        try:
            mode = os.lstat(real).st_mode
        except OSError as error:
            if not path.is_symlink():
                continue  # removed in the meantime
            raise UserError(f"{path} is a link that leads nowhere ({error.strerror})") from error
        if stat.S_ISDIR(mode):
            if real not in visited:
                visited.add(real)
                pending += _to_check(path)
        elif not stat.S_ISREG(mode):
            raise UserError(f"{path}: neither a file nor a folder, but a pipe, a socket or a device")


def _roots(folder: Path) -> list[Path]:
    """Returns the folders into which links in `folder` may lead."""
    real = Path(os.path.realpath(folder))
    for snapshot in (real, *real.parents):
        cached = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and cached.name.startswith(("models--", "datasets--")):
            return [real, *([] if (cached / "blobs").is_symlink() else [cached / "blobs"])]
    return [real]


def _to_check(path: Path) -> list[Path]:
    """Returns the entries of a folder that are not regular files, as sorted paths."""
    try:
        with os.scandir(path) as entries:
            return sorted(path / entry.name for entry in entries if not entry.is_file(follow_symlinks=False))
    except OSError:
        return []  # reading the folder will report the reason


def read_bounded(path: Any, most: int = FILE_BYTES) -> bytes:
    """Returns the content of a file that has at most `most` bytes.

    The limit also protects against sparse files, which are small on disk but would fill memory.

    Raises:
      UserError: the file has more than `most` bytes.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path}: more than {most:,} bytes")
    return data


def appended(path: Path) -> Any:
    """Opens a file for appending bytes, unbuffered. Raises OSError if that fails or the file is a link."""
    return os.fdopen(not_through_a_link(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def not_through_a_link(path: str, flags: int) -> int:
    """An `opener` for `open` that neither follows links nor blocks on pipes."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def unfinished(folder: Any) -> list[Any]:
    """Returns the temporary files that killed calls of `replace_file` left in a folder.

    The result omits the files of processes that still run on this machine. Call this function only while no other
    machine writes to the folder, because it cannot check whether a process on another machine still runs.
    """
    found = [(path, _UNFINISHED.fullmatch(path.name)) for path in entries(folder)]
    return [path for path, name in found if name and not path.is_dir() and not lives(int(name[1]))]


def lives(number: int) -> bool:
    """Returns whether `number` is the id of a process on this machine other than this process. A zombie, which has
    ended but was not waited for, does not count."""
    with contextlib.suppress(OSError):  # on other systems than Linux
        if Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"Z"]:
            return False
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return number != os.getpid()


def replace_file(path: Path, data: str | bytes) -> None:
    """Writes `data` to a temporary file next to `path`, and renames it to `path`. Replaces a link at `path`.

    After an error, removes the temporary file.

    Raises:
      OSError: the file cannot be written.
    """
    # The process id separates concurrent writers. The name is shortened to keep it within 255 bytes.
    temporary = path.with_name(f"{path.name[:60]}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # a killed process with the same id may have left it
    try:
        with temporary.open("xb") as file:  # mode x does not follow a link
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise

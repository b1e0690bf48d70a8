"""A size-limited folder of local copies of remote files. The least recently used copies are removed first."""

import contextlib
import fcntl
import hashlib
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.errors import UserError
from trainer.config.words import sized
from trainer.runtime.lock import lock_file
from trainer.runtime.storage import remedy

if TYPE_CHECKING:
    from trainer.runtime.remote import RemoteFile


_ENDS = 1 << 16  # bytes at each end of a file that are hashed to identify its content


@dataclass(frozen=True)
class Copies:
    """A folder of copies, of at most `most` bytes in total. Several processes may use it at once."""

    folder: Path
    most: int

    def open(self, file: "RemoteFile") -> io.FileIO:
        """Opens the copy of `file`, and creates the copy first if necessary. A copy is not removed while it is open.

        Raises UserError if the copy does not fit or cannot be written.
        """
        digest = hashlib.sha256((file.content or repr((file.url, file.size, *file.marks.items()))).encode())
        if file.content is None:  # then `marks` may be equal for different contents
            digest.update(file.ends(_ENDS))
        path = self.folder / digest.hexdigest()[:16] / file.name
        try:
            if found := _opened(path, file.size):
                return found
            self.check(file)
            self.folder.mkdir(parents=True, exist_ok=True)
            with lock_file(self.folder / ".lock", wait=True):  # type: ignore[union-attr]
                if found := _opened(path, file.size):
                    return found
                self._make_room(file)
                path.parent.mkdir(exist_ok=True)
                part = self.folder / ".part"
                try:
                    with part.open("wb") as copy:
                        for block in file.blocks(0, file.size):
                            copy.write(block)
                    os.utime(part, ns=(time.time_ns(), 0))  # mtime 0 for every copy, because `datasets` compares it
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
                found = _opened(path, file.size)
                assert found is not None
                return found
        except OSError as error:
            raise UserError(
                f"{file} cannot be copied to {self.folder}: {error.strerror or error}; {remedy(error.errno)}, or set "
                "data_cache_directory"
            ) from error

    def check(self, file: "RemoteFile") -> None:
        """Raises UserError if `file` alone is larger than the limit `most`."""
        if file.size > self.most:
            raise UserError(
                f"{file} cannot be read by ranges, and has {sized(file.size)}, but copies of remote files may take "
                f"{sized(self.most)}; raise remote_copies_gib, or copy the file to this machine"
            )

    def _make_room(self, file: "RemoteFile") -> None:
        """Removes the least recently used copies until `file` fits. The caller holds the lock."""
        (self.folder / ".part").unlink(missing_ok=True)  # a killed process may have left it
        sizes = {path: path.stat() for path in self.folder.glob("*/*")}
        total = sum(stat.st_size for stat in sizes.values())
        for path in sorted(sizes, key=lambda path: sizes[path].st_atime_ns):
            if total + file.size <= self.most:
                return
            with path.open("r+b") as copy:  # on NFS, an exclusive lock needs a file that is open for writing
                try:
                    fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue  # another process is reading it
                path.unlink()
            with contextlib.suppress(OSError):  # on NFS, an unlinked file stays in its folder while it is open
                path.parent.rmdir()
            total -= sizes[path].st_size
        if total + file.size > self.most:
            raise UserError(
                f"{file} has {sized(file.size)}, and copies of remote files that are being read take {sized(total)} of "
                f"the {sized(self.most)} in {self.folder}; raise remote_copies_gib, or set a smaller prepare_workers"
            )


class _Copy(io.FileIO):
    """A file that is closed without a ResourceWarning when it is garbage-collected."""

    def __del__(self) -> None:
        self.close()


def _opened(path: Path, size: int) -> io.FileIO | None:
    """Opens a copy, with a lock that prevents its removal. Returns None if the copy does not exist or is incomplete."""
    try:
        copy = _Copy(str(path))
    except FileNotFoundError:
        return None
    fcntl.flock(copy, fcntl.LOCK_SH)
    stat = os.fstat(copy.fileno())
    if not stat.st_nlink or stat.st_size != size:
        copy.close()
        return None
    with contextlib.suppress(OSError):  # fails if another user owns the file
        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))
    return copy

"""Files of a run that grow while it trains."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from trainer.config.errors import UserError
from trainer.runtime.folders import appended, replace_file
from trainer.runtime.storage import remedy


class AppendedFile:
    """A file to which data are appended. Each append is flushed immediately. A context manager.

    If the file is removed or replaced, it is written again with its complete content.
    """

    def __init__(self, path: Path, resumes: bool, say: Callable[[str], None], check: Callable[[], None]):
        """Opens or creates the file.

        Args:
          resumes: whether the run saves checkpoints; if so, error messages advise resuming it.
          say: prints a line.
          check: raises UserError if another process has taken over the run. It is called before the file is written
            again, because that process may be the one that has replaced the file.

        Raises:
          UserError: the file cannot be written.
        """
        self._path, self._resumes, self._say, self._check = path, resumes, say, check
        with disk_errors(path, resumes):
            self._open()

    def _open(self) -> None:
        self._file, self._content = appended(self._path), self._path.open("rb")

    def append(self, data: bytes) -> None:
        """Appends `data`. Raises UserError if the disk is full or the folder is gone."""
        with disk_errors(self._path, self._resumes):
            if not os.fstat(self._file.fileno()).st_nlink:
                self._write_again()
            while data:
                data = data[self._file.write(data) :]

    def _write_again(self) -> None:
        self._check()
        other = f"replaced (the replacement is now {set_aside(self._path)})" if self._path.exists() else "removed"
        self._content.seek(0)
        replace_file(self._path, self._content.read())
        self.close()
        self._open()
        self._say(f"{self._path} was {other}; it is written again with all of its rows")

    def sync(self) -> None:
        """Waits until everything is on disk. Raises UserError like `append`."""
        with disk_errors(self._path, self._resumes):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()
        self._content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def disk_errors(path: Path, resumes: bool) -> Iterator[None]:
    """Turns an OSError that occurs when `path` is written into a UserError. `resumes`: see `AppendedFile`."""
    try:
        yield
    except OSError as error:
        what, remedied = f"cannot write {path}: {error.strerror or error}", remedy(error.errno)
        if resumes:
            what += "; the committed checkpoints are intact"
            remedied += " and run the same command again"
        else:
            remedied += ". The run saves no checkpoints, so it would start over"
        raise UserError(f"{what}: {remedied}") from error


def set_aside(path: Path) -> Path:
    """Renames a file to the first free name of PATH.1, PATH.2, ..., and returns this name."""
    number = 1
    while (moved := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(moved)

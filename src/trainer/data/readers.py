"""The interface of record readers, and the readers of text formats.

Every reader yields records in order, starting at any *cursor*; some readers can also return a record by its number. A
cursor is a byte offset in JSONL and TFRecord files, otherwise a record number. The method `cuts` returns cursors at
which a part can be cut into pieces, so that several processes can read the part.
"""

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from trainer.config.errors import UserError
from trainer.config.limits import TEXT_BYTES, UNPACKED_BYTES, UNPACKED_RATIO
from trainer.data.documents import Location, Record
from trainer.data.text import GZIP, encoding_hint
from trainer.runtime.attempts import later
from trainer.runtime.remote import RemoteFile

Columns = tuple[str, ...]
CHUNK = 256  # the number of records to read at once
_EXPECTED = 1 << 22  # the maximum size of a remote text file that is requested ahead
_BLOCK = 1 << 20  # the number of bytes to read at once while skipping the rest of a line


class NoColumn(UserError):
    """A column is missing. `problem`: the beginning of the message; `there`: the names of the existing columns."""

    def __init__(self, problem: str, there: Iterable[str]):
        self.there = tuple(there)
        keys = "set train_data_columns or eval_data_columns to some of"
        super().__init__(f"{problem}; {keys}: {', '.join(self.there)}")


class Part(Protocol):
    """Some of the records of a source, such as the records of one file."""

    @property
    def name(self) -> str:
        """The name in messages, such as the path of a file."""
        ...

    @property
    def weight(self) -> int:
        """The part's size in bytes or records, from which progress is computed."""
        ...

    @property
    def size(self) -> int:
        """The part's size in bytes, which determines how many pieces it is cut into."""
        ...

    @property
    def restores(self) -> bool:
        """Whether `data.arrow` restores values of the columns to their original form. Earlier versions of trainer read
        these values without restoring them, so data that they prepared from the part are not reused."""
        ...

    def cuts(self, count: int) -> list[int]:
        """Returns at most `count` - 1 increasing cursors that cut the part into pieces of about equal size; [] if the
        part cannot be cut. For a given `count`, the cursors depend only on the part's contents."""
        ...

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        """Yields (cursor after the record, share of the part read so far, record) for each record from `cursor` on.

        `stop`: the end of the piece, a cursor that `cuts` returned; None: the end of the part. A record that begins
        before `stop` is read to its end.
        """
        ...


class IndexedPart(Part, Protocol):
    """A part whose records can be read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


class FilePart:
    """A part that is one file: `path` is a path or a `RemoteFile`. Raises UserError if the file is missing or empty."""

    restores = False

    def __init__(self, path: Any, columns: Columns):
        self.path, self.columns = path, columns
        try:
            self.weight = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        if not self.weight:
            raise UserError(f"{path} is empty; remove it, or take it out of the files that the configuration names")

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.weight

    def cuts(self, count: int) -> list[int]:
        return []

    def pick(self, values: Any, where: Any) -> Record:
        """Returns the record with the wanted columns of the dict `values`."""
        return pick(values, self.columns, where)


class TextPart(FilePart):
    """A text file, which is one document. A byte order mark at its beginning is omitted."""

    _expected: Future[bytes] | None = None

    def expect(self) -> None:
        """Requests the content of a small remote file ahead of `read`."""
        if isinstance(self.path, RemoteFile) and self.weight <= _EXPECTED and self._expected is None:
            self._expected = later(self.path.read_bytes)

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        if cursor == 0:
            content = self._expected.result() if self._expected else self.path.read_bytes()
            self._expected = None
            yield 1, 1.0, Record(Location(self.name), (content.removeprefix(codecs.BOM_UTF8),))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_expected": None}


class Line(Location):
    """The location of a line in a file. `number` is the offset of the line's first byte; the line number is computed
    only for messages."""

    def __str__(self) -> str:
        if not Path(self.name).is_file():  # the file was removed after the line was read, or is remote
            return super().__str__()
        try:
            with opened(Path(self.name)) as file:
                number, left = 1, self.number
                while left > 0 and (block := file.read(min(left, 1 << 20))):
                    number, left = number + block.count(b"\n"), left - len(block)
        except (OSError, EOFError, zlib.error):
            return super().__str__()
        return f"{self.name}, line {number}"


LINE = "at byte"  # the unit of a `Line`


@contextlib.contextmanager
def opened(path: Any, stop: int | None = None) -> Iterator[Any]:
    """Opens a file for reading bytes, decompressed if it is gzip. In a remote file, read-ahead ends at `stop`."""
    with path.open("rb", buffering=0) as file:
        compressed = file.read(len(GZIP)) == GZIP
    if not compressed:
        with path.open("rb", stop=stop) if isinstance(path, RemoteFile) else path.open("rb") as file:
            yield file
    else:
        with path.copied() if isinstance(path, RemoteFile) else path.open("rb") as file, gzip.open(file) as unpacked:
            yield unpacked


class JsonlPart(FilePart):
    """A file with one JSON object per line, possibly compressed by gzip. Blank lines are skipped."""

    def cuts(self, count: int) -> list[int]:
        with self.path.open("rb", buffering=0) as file:
            compressed = file.read(len(GZIP)) == GZIP
        return [] if compressed else even_cuts(self.weight, count)

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        with damaged_file(self.path, (OSError, EOFError, zlib.error)), opened(self.path, stop) as file:
            if cursor:  # the cursor may be within a line, which belongs to the previous piece
                file.seek(cursor - 1)
                while (skipped := file.readline(_BLOCK)) and not skipped.endswith(b"\n"):
                    pass
                cursor = file.tell()
            most = min(TEXT_BYTES, max(UNPACKED_BYTES, UNPACKED_RATIO * self.weight))
            while (stop is None or cursor < stop) and (line := file.readline(most + 1)):
                where = Line(self.name, cursor, LINE)
                if len(line) > most:
                    raise UserError(f"{where}, has more than {most:,} bytes")
                cursor += len(line)
                if not line.strip():
                    continue
                try:
                    # `surrogatepass` accepts surrogates that are encoded in UTF-8. Texts may contain these as well as
                    # escaped surrogates.
                    values = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"))
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{where}, is not JSON ({error}){encoding_hint(line)}; fix or remove the line"
                    ) from error
                if not isinstance(values, dict):
                    raise UserError(f"{where}, is not a JSON object; fix or remove the line")
                read = file.fileobj.tell() if hasattr(file, "fileobj") else cursor
                yield cursor, read / self.weight, self.pick(values, where)


def even_cuts(size: int, count: int) -> list[int]:
    """Returns the cursors that cut `size` bytes or records into `count` pieces of about equal size."""
    return sorted({size * i // count for i in range(1, count)} - {0})


def pick(values: Any, columns: Columns, where: Any) -> Record:
    """Returns the wanted columns of a dict. Raises UserError if a column is missing, or if a value is too long."""
    try:
        record = Record(where, tuple(values[name] for name in columns))
    except KeyError as error:
        raise NoColumn(f"{where}, there is no column {error.args[0]}", map(str, values)) from error
    for name, value in zip(columns, record.values, strict=True):
        if isinstance(value, str | bytes) and len(value) > TEXT_BYTES:
            raise UserError(f"{where}: column {name} has more than {TEXT_BYTES:,} bytes; cut the text")
    return record


def parsed(parse: Callable[[bytes], Any], data: bytes, columns: Columns, where: Location) -> Record:
    """Returns the wanted columns of the dict `parse(data)`."""
    try:
        values = parse(data)
    except ValueError as error:
        raise UserError(f"{where}: {error}; the file may be damaged, or of a different grain_file_type") from error
    return pick(values, columns, where)


class damaged_file:
    """A context manager that converts an exception of one of the types `errors` into a UserError that names the
    file."""

    def __init__(self, path: Any, errors: tuple[type[Exception], ...]):
        self._path, self._errors = path, errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, self._errors) and not isinstance(error, UserError):
            text = " ".join(str(error).split())[:200]
            raise UserError(
                f"{self._path} is damaged, or not in the expected format ({text}); copy it or write it again"
            ) from error


def indexed(parts: Sequence[Part]) -> bool:
    """Returns whether the records of all parts can be read by number."""
    return all(hasattr(part, "__getitem__") for part in parts)

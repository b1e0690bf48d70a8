"""Readers for files of records, one class per format: in order from any position, and by index if the format allows.

A *cursor* is the position from which to resume: a byte offset in JSONL and TFRecord files, otherwise a record number.
Parts can be cut at some cursors (`cuts`), to be read by several processes.
"""

import codecs
import contextlib
import functools
import gzip
import io
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.limits import FILE_BYTES, TEXT_BYTES, UNPACKED_BYTES, UNPACKED_RATIO
from trainer.data.arrow import restored, restored_columns, rows_of
from trainer.data.documents import Location, Record
from trainer.data.text import GZIP, encoding_hint
from trainer.data.unpacked import rows_at_once
from trainer.runtime.attempts import later
from trainer.runtime.crc32c import masked_crc32c
from trainer.runtime.remote import RemoteFile

Columns = tuple[str, ...]
_CHUNK = 256  # records to read at once
_EXPECTED = 1 << 22  # bytes of the largest text file that is requested before it is read
_BLOCK = 1 << 20  # bytes to read at once of a line that is skipped


class NoColumn(UserError):
    """A column is missing. `problem`: the message; `there`: the existing columns."""

    def __init__(self, problem: str, there: Iterable[str]):
        self.there = tuple(there)
        keys = "set train_data_columns or eval_data_columns to some of"
        super().__init__(f"{problem}; {keys}: {', '.join(self.there)}")


class Part(Protocol):
    """Some records of a source."""

    @property
    def name(self) -> str:
        """The file, or another name for messages."""
        ...

    @property
    def weight(self) -> int:
        """The part's size in bytes or records, for progress."""
        ...

    @property
    def size(self) -> int:
        """The part's size in bytes, by which it is cut."""
        ...

    @property
    def restores(self) -> bool:
        """Whether the columns are restored (`data.arrow`); earlier versions read other values."""
        ...

    def cuts(self, count: int) -> list[int]:
        """Returns at most `count` - 1 increasing cursors, which cut the part into pieces of about equal sizes; [] if it
        cannot be cut. They depend only on the part's contents."""
        ...

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        """Yields, from `cursor` on: the cursor after each record, the share of the part read so far, and the record.

        `stop`: the end, None or one of `cuts`. Records that begin before it are read whole.
        """
        ...


class IndexedPart(Part, Protocol):
    """A part whose records can be read by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


class FilePart:
    """A file: a path, or a `RemoteFile`. Raises UserError if it is missing or empty."""

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
    """A text file is one document, without its byte order mark."""

    _expected: Future[bytes] | None = None

    def expect(self) -> None:
        """Requests the content, if it is remote and small, before it is read."""
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
    """The line of a file that begins at a byte offset, `number`. The line's number is computed only for messages."""

    def __str__(self) -> str:
        if not Path(self.name).is_file():  # it was removed after the line was read, or is remote
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
    """Opens a file for reading bytes, decompressed if it is gzip. Of a remote file, nothing after `stop` is requested
    ahead."""
    with path.open("rb", buffering=0) as file:
        compressed = file.read(len(GZIP)) == GZIP
    if not compressed:
        with path.open("rb", stop=stop) if isinstance(path, RemoteFile) else path.open("rb") as file:
            yield file
    else:
        with path.copied() if isinstance(path, RemoteFile) else path.open("rb") as file, gzip.open(file) as unpacked:
            yield unpacked


class JsonlPart(FilePart):
    """One JSON object per line, perhaps compressed by gzip; blank lines are skipped."""

    def cuts(self, count: int) -> list[int]:
        with self.path.open("rb", buffering=0) as file:
            compressed = file.read(len(GZIP)) == GZIP
        return [] if compressed else _even_cuts(self.weight, count)

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        with damaged_file(self.path, (OSError, EOFError, zlib.error)), opened(self.path, stop) as file:
            if cursor:  # it may be within a line, which belongs to the piece before
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
                    # Surrogates in a text may be escaped, or encoded like characters.
                    values = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"))
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{where}, is not JSON ({error}){encoding_hint(line)}; fix or remove the line"
                    ) from error
                if not isinstance(values, dict):
                    raise UserError(f"{where}, is not a JSON object; fix or remove the line")
                read = file.fileobj.tell() if hasattr(file, "fileobj") else cursor
                yield cursor, read / self.weight, self.pick(values, where)


class ParquetPart(FilePart):
    """A Parquet file."""

    def __init__(self, path: Any, columns: Columns):
        super().__init__(path, columns)
        import pyarrow

        self._metadata: Any = None
        if isinstance(path, RemoteFile):
            with self._errors(pyarrow):
                self._metadata = _remote_metadata(path)
        with self._errors(pyarrow), self._open() as file:
            names, self._rows = file.schema_arrow.names, file.metadata.num_rows
            self.restores = bool(restored_columns(file.schema_arrow, json=True).keys() & {*columns})
            groups = range(file.metadata.num_row_groups)
            self._groups = [file.metadata.row_group(i).num_rows for i in groups]
            self._sizes = [file.metadata.row_group(i).total_byte_size for i in groups]
            # Looking at the pages of a remote file takes a request for each column of each row group.
            self._chunk = 0 if self._metadata else rows_at_once(path, file.metadata, columns, _CHUNK)
        pick(dict.fromkeys(names), columns, self.name)

    def cuts(self, count: int) -> list[int]:
        ends, sizes = np.cumsum(self._groups), np.cumsum(self._sizes)
        if not self._groups:
            return []
        wanted = [sizes[-1] * i // count for i in range(1, count)]
        return sorted({int(end) for end in ends[np.searchsorted(sizes, wanted)]} - {0, self._rows})

    def _open(self):
        import pyarrow.parquet

        if not isinstance(self.path, RemoteFile):
            return pyarrow.parquet.ParquetFile(self.path, page_checksum_verification=True)
        # `pre_buffer` would request all row groups at once.
        return pyarrow.parquet.ParquetFile(
            self.path.open(buffering=0), metadata=self._metadata, pre_buffer=False, page_checksum_verification=True
        )

    def _errors(self, pyarrow: Any):
        return damaged_file(self.path, (pyarrow.ArrowException, OSError))

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        import pyarrow

        first, at = 0, 0
        while first < len(self._groups) and at + self._groups[first] <= cursor:
            at, first = at + self._groups[first], first + 1
        self._chunk = self._chunk or rows_at_once(self.path, self._metadata, self.columns, _CHUNK)
        with self._errors(pyarrow), self._open() as file:
            ends = itertools.accumulate(self._groups)
            last = sum(end <= (self._rows if stop is None else stop) for end in ends)  # pieces end with a row group
            left, columns = list(range(first, last)), list(self.columns)
            for batch in file.iter_batches(self._chunk, row_groups=left, columns=columns) if left else ():
                for values in rows_of(batch) if at + len(batch) > cursor else [None] * len(batch):
                    at += 1
                    if at > cursor:
                        yield at, at / self._rows, self.pick(values, Location(self.name, at, "row"))
        if isinstance(self.path, RemoteFile):
            self.path.check()


def _remote_metadata(path: RemoteFile) -> Any:
    """Returns the metadata of a Parquet file. pyarrow would request 64 KiB for them, and again at each opening."""
    import pyarrow.parquet

    with path.open(buffering=0) as file:
        file.seek(max(0, path.size - 8))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little") if end.endswith(b"PAR1") else 0
        file.seek(max(0, path.size - 8 - min(length, FILE_BYTES)))
        return pyarrow.parquet.read_metadata(io.BytesIO(b"PAR1" + file.read(8 + min(length, FILE_BYTES))))


class ArrayRecordPart(FilePart):
    """Records [start, stop) of an ArrayRecord file. `parse` turns a record into a dict."""

    def __init__(
        self, path: Any, columns: Columns, parse: Callable[[bytes], Any], start: int = 0, stop: int | None = None
    ):
        super().__init__(path, columns)
        self._parse, self._start, self._given = parse, start, stop
        self._reader: Any = None
        self._copy: Any = None  # of a remote file, held open so that it stays
        if not isinstance(path, RemoteFile):
            len(self)  # raises for a damaged file
        self._reader = None  # each process that reads opens a separate one

    @functools.cached_property
    def _stop(self) -> int:
        with self._errors():
            count = self._open().num_records()
        if not count:
            # The number of records is stored at the end of a file.
            raise UserError(
                f"{self.path} is damaged, truncated, or not an ArrayRecord file: no records can be read; "
                "copy it or write it again"
            )
        if self._given is not None and self._given > count:
            raise UserError(
                f"{self.path} has {count} records, but dataset_info.json lists more; copy or prepare it again"
            )
        self._release()
        return count if self._given is None else self._given

    @property
    def size(self) -> int:
        if not self._start and self._given is None:
            return self.weight
        length = len(self)
        with self._errors():
            size = self.weight * length // self._open().num_records()
        self._release()
        return size

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Record:
        with self._errors():
            (data,) = self._open().read([self._start + index])
        return self._record(data, index)

    def cuts(self, count: int) -> list[int]:
        return _even_cuts(len(self), count)

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        end = self._stop if stop is None else self._start + stop
        try:
            for first in range(self._start + cursor, end, _CHUNK):
                with self._errors():
                    chunk = self._open().read(list(range(first, min(first + _CHUNK, end))))
                for index, data in enumerate(chunk, first - self._start):
                    yield index + 1, (index + 1) / len(self), self._record(data, index)
        finally:
            self._release()

    def _release(self) -> None:
        """Closes a copy, so that others may take its place."""
        if self._copy is not None:
            self._reader = self._copy = None

    def _record(self, data: bytes, index: int) -> Record:
        return parsed(self._parse, data, self.columns, Location(self.name, self._start + index, "record"))

    def _open(self) -> Any:
        if self._reader is None:
            from array_record.python.array_record_module import ArrayRecordReader

            if isinstance(self.path, RemoteFile):
                self._copy = self.path.copied()
            path = self._copy.name if self._copy else str(self.path)
            self._reader = ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
        return self._reader

    def _errors(self):
        return damaged_file(self.path, (RuntimeError, ValueError, IndexError, OSError))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None, "_copy": None}


class TfrecordPart(FilePart):
    """A TFRecord file. The lengths and checksums in it are checked."""

    def __init__(self, path: Any, columns: Columns, parse: Callable[[bytes], Any]):
        super().__init__(path, columns)
        self._parse = parse

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        with self.path.open("rb") as file:
            file.seek(cursor)
            while header := file.read(12):
                size = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else self.weight
                data = file.read(size + 4) if cursor + size + 16 <= self.weight else b""
                if len(data) != size + 4:
                    raise UserError(
                        f"{self.path}: the record at byte {cursor} is truncated or not a TFRecord; copy it again"
                    )
                (head_sum,), (data_sum,) = struct.unpack("<I", header[8:]), struct.unpack("<I", data[size:])
                start, cursor, data = cursor, cursor + size + 16, data[:size]
                if head_sum != masked_crc32c(header[:8]) or data_sum != masked_crc32c(data):
                    raise UserError(
                        f"{self.path}: the record at byte {start} does not match its checksum, so the file is damaged; "
                        "copy it or write it again"
                    )
                record = parsed(self._parse, data, self.columns, Location(self.name, start, "record at byte"))
                yield cursor, cursor / self.weight, record


class TablePart:
    """A table of the `datasets` library."""

    def __init__(self, name: str, table: Any, columns: Columns):
        self.name, self._table, self._columns, self.weight = name, table, columns, len(table)
        self._restored = restored_columns(table.features.arrow_schema)
        self.restores = bool(self._restored.keys() & {*columns})

    @property
    def size(self) -> int:
        return int(self._table.data.nbytes)

    def cuts(self, count: int) -> list[int]:
        return _even_cuts(len(self), count)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Record:
        where = Location(self.name, index, "row")
        try:
            values = restored(self._table[int(index)], self._restored)
        except UnicodeDecodeError:
            (values,) = rows_of(self._table.with_format("arrow")[int(index) : int(index) + 1])
        except arrow_errors() as error:
            raise UserError(f"{where}, cannot be read ({shortened(str(error))}); is it text?") from error
        return pick(values, self._columns, where)

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        end = len(self) if stop is None else stop
        for first in range(cursor, end, _CHUNK):
            for index in range(first, min(first + _CHUNK, end)):
                yield index + 1, (index + 1) / len(self), self[index]


def _even_cuts(size: int, count: int) -> list[int]:
    return sorted({size * i // count for i in range(1, count)} - {0})


def arrow_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that pyarrow and `datasets` raise for files that contradict their metadata."""
    import pyarrow

    return pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError


def pick(values: Any, columns: Columns, where: Any) -> Record:
    """Returns the wanted columns of a dict. If a column is missing, the UserError names the existing ones."""
    try:
        record = Record(where, tuple(values[name] for name in columns))
    except KeyError as error:
        raise NoColumn(f"{where}, there is no column {error.args[0]}", map(str, values)) from error
    for name, value in zip(columns, record.values, strict=True):
        if isinstance(value, str | bytes) and len(value) > TEXT_BYTES:
            raise UserError(f"{where}: column {name} has more than {TEXT_BYTES:,} bytes; cut the text")
    return record


def parsed(parse: Callable[[bytes], Any], data: bytes, columns: Columns, where: Location) -> Record:
    """Returns `pick` of the result of `parse(data)`."""
    try:
        values = parse(data)
    except ValueError as error:
        raise UserError(f"{where}: {error}; the file may be damaged, or of a different grain_file_type") from error
    return pick(values, columns, where)


class damaged_file:
    """A context that turns `errors` into a UserError that names the file."""

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
    """Returns whether all records can be read by number."""
    return all(hasattr(part, "__getitem__") for part in parts)

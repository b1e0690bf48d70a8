"""Readers for files of binary records: ArrayRecord and TFRecord."""

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

from trainer.config.errors import UserError
from trainer.data.documents import Location, Record
from trainer.data.readers import CHUNK, Columns, FilePart, damaged_file, even_cuts, parsed
from trainer.runtime.crc32c import masked_crc32c
from trainer.runtime.remote import RemoteFile


class ArrayRecordPart(FilePart):
    """Records [start, stop) of an ArrayRecord file (`stop` None: up to the end). `parse` turns a record into a dict."""

    def __init__(
        self, path: Any, columns: Columns, parse: Callable[[bytes], Any], start: int = 0, stop: int | None = None
    ):
        super().__init__(path, columns)
        self._parse, self._start, self._given = parse, start, stop
        self._reader: Any = None
        self._copy: Any = None  # the local copy of a remote file, kept open so that it is not removed
        if not isinstance(path, RemoteFile):
            len(self)  # raises UserError if the file is damaged
        self._reader = None  # each process that reads records opens a separate reader

    @functools.cached_property
    def _stop(self) -> int:
        with self._errors():
            count = self._open().num_records()
        if not count:
            # The number of records is stored at the end of the file, so a truncated file may appear empty.
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
        return even_cuts(len(self), count)

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        end = self._stop if stop is None else self._start + stop
        try:
            for first in range(self._start + cursor, end, CHUNK):
                with self._errors():
                    chunk = self._open().read(list(range(first, min(first + CHUNK, end))))
                for index, data in enumerate(chunk, first - self._start):
                    yield index + 1, (index + 1) / len(self), self._record(data, index)
        finally:
            self._release()

    def _release(self) -> None:
        """Closes the local copy of a remote file, so that the copy may be removed to free disk space."""
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
    """A TFRecord file. Reading verifies the lengths and checksums that the file contains."""

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

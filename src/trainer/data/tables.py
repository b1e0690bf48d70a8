"""Readers of Arrow tables: Parquet files, and tables of the `datasets` library."""

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.limits import FILE_BYTES
from trainer.data.arrow import restored, restored_columns, rows_of
from trainer.data.documents import Location, Record
from trainer.data.readers import CHUNK, Columns, FilePart, damaged_file, even_cuts, pick
from trainer.data.unpacked import rows_at_once
from trainer.runtime.remote import RemoteFile


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
            self._chunk = 0 if self._metadata else rows_at_once(path, file.metadata, columns, CHUNK)
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
        # `pre_buffer=True` would request all row groups at once.
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
        with self._errors(pyarrow), self._open() as file:
            ends = itertools.accumulate(self._groups)
            # A piece ends at the end of a row group.
            last = sum(end <= (self._rows if stop is None else stop) for end in ends)
            for batch in self._batches(file, range(first, last)):
                for values in rows_of(batch) if at + len(batch) > cursor else [None] * len(batch):
                    at += 1
                    if at > cursor:
                        yield at, at / self._rows, self.pick(values, Location(self.name, at, "row"))
        if isinstance(self.path, RemoteFile):
            self.path.check()

    def _batches(self, file: Any, groups: Sequence[int]) -> Iterator[Any]:
        """Yields the rows of row groups in batches. The batch size of each row group of a remote file is determined
        only when the group is read, because this takes a request for each dictionary-encoded column."""
        columns = list(self.columns)
        for some in [[group] for group in groups] if self._metadata else [list(groups)] if groups else []:
            chunk = self._chunk or rows_at_once(self.path, self._metadata, columns, CHUNK, some)
            yield from file.iter_batches(chunk, row_groups=some, columns=columns)


def _remote_metadata(path: RemoteFile) -> Any:
    """Returns the metadata of a Parquet file, for reuse: pyarrow would request 64 KiB each time it opens the file."""
    import pyarrow.parquet

    with path.open(buffering=0) as file:
        file.seek(max(0, path.size - 8))
        end = file.read(8)
        length = int.from_bytes(end[:4], "little") if end.endswith(b"PAR1") else 0
        file.seek(max(0, path.size - 8 - min(length, FILE_BYTES)))
        return pyarrow.parquet.read_metadata(io.BytesIO(b"PAR1" + file.read(8 + min(length, FILE_BYTES))))


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
        return even_cuts(len(self), count)

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
        for first in range(cursor, end, CHUNK):
            for index in range(first, min(first + CHUNK, end)):
                yield index + 1, (index + 1) / len(self), self[index]


def arrow_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that pyarrow and `datasets` raise for files that contradict their metadata."""
    import pyarrow

    return pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, AttributeError, ImportError

"""Packed rows as memory-mapped NumPy files in one folder per part of the data.

- rows.npy [rows, fields, length]: the rows.
- crc32.npy [rows]: the checksum of each row.
- segments.npy [segments, 4]: the origin of each segment: the index of the file or table that contains its record, the
  number of the record in that file or table, and `start` and `after` of its `packing.Origin`.
- segment_ends.npy [rows]: the total number of segments up to the end of each row.
"""

import functools
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.batches import Batch, make_batch
from trainer.data.cache import META, damaged
from trainer.data.packing import Origin, Packed

FILE, SUMS = "rows.npy", "crc32.npy"
SEGMENTS, ENDS = "segments.npy", "segment_ends.npy"
_OPEN = 64  # the maximum number of folders that are open at the same time
_FIELDS = ("inputs", "targets", "segmentation", "loss")  # `loss` is stored only if it excludes some targets
Names = dict[tuple[str, str], int]  # maps the (name, unit) of a `Location` to the index of its file or table


class StoredRows:
    """A source of rows: concatenates the rows that `write` stored in several folders. Reads only the requested rows,
    and verifies each of them.

    Args:
      folders: each folder with its number of rows, which is not 0.
      limit: the upper bound (exclusive) of the token ids.

    Raises UserError if a file's header or a requested row is damaged.
    """

    def __init__(self, folders: Sequence[tuple[Path, int]], limit: int = 1 << 31):
        self._folders, self._limit = folders, limit
        self._ends = np.cumsum([rows for _, rows in folders])
        # At most _OPEN folders are kept open, because each takes two file descriptors.
        self._open = functools.lru_cache(_OPEN)(self._opened)
        self.size, self.length = int(self._ends[-1]), int(self._open(0)[0].shape[2])

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n] as a batch (see `trainer.data.batches`) without the entry `row`."""
        stored = np.searchsorted(self._ends, indices, side="right")
        found: list[Any] = [None] * len(indices)
        for i in np.unique(stored).tolist():
            here = np.flatnonzero(stored == i)
            for at, row in zip(here, self._read(i, indices[here] - self._first(i)), strict=True):
                found[at] = row
        return make_batch(*np.stack(found).swapaxes(0, 1))

    def place(self, index: int) -> tuple[Path, int]:
        """Returns the folder of a row, and the row's index in it."""
        i = int(np.searchsorted(self._ends, index, side="right"))
        return self._folders[i][0], index - self._first(i)

    def _first(self, i: int) -> int:
        return int(self._ends[i - 1]) if i else 0

    def _read(self, i: int, indices: np.ndarray) -> np.ndarray:
        stored, sums = self._open(i)
        rows = stored[indices]
        for index, row, checksum in zip(indices, rows, sums[indices], strict=True):
            if zlib.crc32(row.data) != checksum:
                raise damaged(self._folders[i][0], FILE, f"is damaged: row {index} does not match its checksum")
        if rows.min() < 0 or rows[:, :2].max() >= self._limit:
            raise damaged(self._folders[i][0], FILE, f"is damaged: ids must be from 0 to {self._limit - 1}")
        return rows

    def _opened(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and the checksums of a folder."""
        folder, size = self._folders[i]
        rows, sums = _mapped(folder, FILE, 3), _mapped(folder, SUMS, 1)
        if len(sums) != len(rows):
            raise damaged(folder, SUMS, f"has {len(sums)} checksums for {len(rows)} rows")
        if len(rows) != size:
            raise damaged(folder, META, f"states {size} rows, but there are {len(rows)}")
        return rows, sums


def origins(folder: Path, index: int) -> np.ndarray | None:
    """Returns the entries of SEGMENTS for row `index` of a folder: int64 [segments of the row, 4]. Returns None if the
    folder was written by an earlier version, which did not store origins."""
    if not (folder / SEGMENTS).exists():
        return None
    ends, segments = _mapped(folder, ENDS, 1), _mapped(folder, SEGMENTS, 2)
    return np.array(segments[int(ends[index - 1]) if index else 0 : int(ends[index])])


def _mapped(folder: Path, name: str, axes: int) -> np.ndarray:
    try:
        array = np.load(folder / name, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise damaged(folder, name, f"cannot be read ({type(error).__name__}: {error})") from error
    if array.ndim != axes:
        raise damaged(folder, name, f"cannot be read (it has {array.ndim} axes instead of {axes})")
    return array


def write(folder: Path, rows: Iterable[Packed], *, length: int, vocab_size: int, masked: bool) -> list[tuple[str, str]]:
    """Writes `rows` into `folder`, in order and in bounded memory. Returns a list with the (name, unit) of each file or
    table, see `Location`. SEGMENTS contains indices of this list.

    Rows are stored as uint16 if all token ids and segment ids (1 to `length`) fit, otherwise as int32. `masked`:
    whether to store which targets contribute to the loss. Raises OSError if the disk is full.
    """
    dtype = np.dtype(np.uint16 if max(vocab_size, length + 1) <= 1 << 16 else np.int32)
    fields = _FIELDS if masked else _FIELDS[:-1]
    names: Names = {}
    with (
        _Growing(folder / FILE, (len(fields), length), dtype) as stored,
        _Growing(folder / SUMS, (), "<u4") as sums,
        _Growing(folder / SEGMENTS, (4,), "<i8") as segments,
        _Growing(folder / ENDS, (), "<i8") as ends,
    ):
        for packed in rows:
            array = np.stack([packed.row[name] for name in fields]).astype(dtype)
            stored.append(array)
            sums.append(np.asarray(zlib.crc32(array.data), "<u4"))
            for origin in packed.origins:
                segments.append(np.asarray(_line(origin, names), "<i8"))
            ends.append(np.asarray(segments.count, "<i8"))
    return [*names]


def _line(origin: Origin, names: Names) -> tuple[int, int, int, int]:
    place = origin.mark
    return names.setdefault((place.name, place.unit), len(names)), place.number, origin.start, origin.after


class _Growing:
    """A file in NumPy's format with an array [count, *shape] that grows along its first axis."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any):
        self._file, self.count = path.open("wb"), 0
        self._shape, self._dtype = shape, np.dtype(dtype)

    def __enter__(self) -> "_Growing":
        self._write_header()
        self._start = self._file.tell()
        return self

    def append(self, array: np.ndarray) -> None:
        """Appends `array`, which has the constructor's shape and dtype."""
        self._file.write(array.data)
        self.count += 1

    def __exit__(self, *_: Any) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._start, "NumPy pads the header, so its size is constant"

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header: dict[str, Any] = {"shape": (self.count, *self._shape), "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(self._file, header)

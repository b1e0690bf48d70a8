"""Packed rows as memory-mapped NumPy files: rows.npy [rows, fields, length], and their checksums crc32.npy [rows]."""

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.batches import Batch, make_batch
from trainer.data.cache import damaged
from trainer.data.packing import PackedRow

FILE, SUMS = "rows.npy", "crc32.npy"
_FIELDS = ("inputs", "targets", "segmentation", "loss")  # the last one only if some targets bear no loss


class StoredRows:
    """The rows stored by `write`, as a source. Reads only the requested rows, and verifies each of them.

    Raises UserError if a file's header or a requested row is damaged.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows, self._sums = _mapped(folder, FILE, 3), _mapped(folder, SUMS, 1)
        self.size, _, self.length = self._rows.shape
        if len(self._sums) != self.size:
            raise damaged(folder, SUMS, f"has {len(self._sums)} checksums for {self.size} rows")

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n], a batch without `row`."""
        rows = self._rows[indices]
        for index, row, checksum in zip(indices, rows, self._sums[indices], strict=True):
            if zlib.crc32(row.data) != checksum:
                raise damaged(self._folder, FILE, f"is damaged: row {index} does not match its checksum")
        return make_batch(*rows.swapaxes(0, 1))


def _mapped(folder: Path, name: str, axes: int) -> np.ndarray:
    try:
        array = np.load(folder / name, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise damaged(folder, name, f"cannot be read ({type(error).__name__}: {error})") from error
    if array.ndim != axes:
        raise damaged(folder, name, f"cannot be read (it has {array.ndim} axes instead of {axes})")
    return array


def write(folder: Path, rows: Iterable[PackedRow], *, length: int, vocab_size: int, masked: bool) -> None:
    """Writes `rows` into `folder`, in order and in bounded memory.

    Ids are stored in 16 bits if they and the segment numbers, 1 to `length`, fit. `masked`: whether some targets bear
    no loss. Raises OSError if the disk is full.
    """
    dtype = np.dtype(np.uint16 if max(vocab_size, length + 1) <= 1 << 16 else np.int32)
    fields = _FIELDS if masked else _FIELDS[:-1]
    with _Growing(folder / FILE, (len(fields), length), dtype) as stored, _Growing(folder / SUMS, (), "<u4") as sums:
        for row in rows:
            array = np.stack([row[name] for name in fields]).astype(dtype)
            stored.append(array)
            sums.append(np.asarray(zlib.crc32(array.data), "<u4"))


class _Growing:
    """A file in NumPy's format with an array [n, *shape] that grows along its first axis."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any):
        self._file, self._count = path.open("wb"), 0
        self._shape, self._dtype = shape, np.dtype(dtype)

    def __enter__(self) -> "_Growing":
        self._write_header()
        self._start = self._file.tell()
        return self

    def append(self, array: np.ndarray) -> None:
        """Appends `array`, which has the constructor's shape and dtype."""
        self._file.write(array.data)
        self._count += 1

    def __exit__(self, *_: Any) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            assert self._file.tell() == self._start, "NumPy leaves room for the number of rows"

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header: dict[str, Any] = {"shape": (self._count, *self._shape), "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(self._file, header)

"""Packed rows in one file of NumPy's format, [rows, fields, length]: written as they come, and mapped to be read."""

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.data.batches import Batch, make_batch
from trainer.data.cache import damaged
from trainer.data.packing import PackedRow

FILE = "rows.npy"
_FIELDS = ("inputs", "targets", "segmentation", "loss")  # the last only where some targets bear no loss


class StoredRows:
    """What `write` wrote, as a source of rows. Only the rows that are asked for are read.

    Raises UserError where the file's header is damaged.
    """

    def __init__(self, folder: Path):
        try:
            self._rows = np.load(folder / FILE, mmap_mode="r")
            self.size, _, self.length = self._rows.shape
        except (OSError, ValueError) as error:
            raise damaged(folder, FILE, f"cannot be read ({type(error).__name__}: {error})") from error

    def rows(self, indices: np.ndarray) -> Batch:
        """The rows at `indices` [n], a batch without `row`."""
        return make_batch(*self._rows[indices].swapaxes(0, 1))


def write(folder: Path, rows: Iterable[PackedRow], *, length: int, vocab_size: int, masked: bool) -> None:
    """Writes `rows` into `folder`, in their order and in bounded memory.

    Ids are stored in 16 bits where they and the numbers of a row's segments, 1 to `length`, fit. `masked` says whether
    some targets bear no loss.
    Raises OSError where the disk is full.
    """
    dtype = np.dtype(np.uint16 if max(vocab_size, length + 1) <= 1 << 16 else np.int32)
    fields, count = _FIELDS if masked else _FIELDS[:-1], 0
    with (folder / FILE).open("wb") as file:
        _write_header(file, (0, len(fields), length), dtype)
        start = file.tell()
        for row in rows:
            file.write(np.stack([row[name] for name in fields]).astype(dtype).data)
            count += 1
        file.seek(0)
        _write_header(file, (count, len(fields), length), dtype)
        assert file.tell() == start, "NumPy leaves room for the number of rows"


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> None:
    header: dict[str, Any] = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    np.lib.format.write_array_header_1_0(file, header)

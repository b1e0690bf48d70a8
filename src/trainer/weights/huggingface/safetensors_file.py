"""Reads parts of tensors from safetensors files, and writes files tensor by tensor.

The safetensors library writes only complete files. A file contains the length of the header (8 bytes,
little-endian), the header (JSON), and the bytes of the tensors in C order (https://huggingface.co/docs/safetensors,
"Format").
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np

from trainer.config.errors import UserError
from trainer.leaves.source import Box

# The dtypes of unquantized weights, by their names in the format.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# A dtype that only quantized matrices may use; see `trainer.weights.huggingface.packed`.
FLOAT8 = "F8_E4M3"
_READ = {
    **DTYPES,
    FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn),
    **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 32, 64)},
    "U8": np.dtype(np.uint8),
}
# The dtypes whose values can be displayed: not only ours, because any program may have written the file.
_SHOWN = {
    **_READ,
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F64": np.dtype(np.float64),
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
}
NAMES = {dtype: name for name, dtype in _SHOWN.items()}

_STRIP = 1 << 25  # bytes to read at once

Tensors = dict[str, tuple[tuple[int, ...], np.dtype]]  # name: (shape, dtype)


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    kind: str  # the dtype's name in the format; `read` may not support the dtype
    shape: tuple[int, ...]
    start: int  # position of its first byte in the file
    nbytes: int  # bytes in the file

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensor's values; `read` must support it."""
        return _READ[self.kind]

    def read(self, box: Box) -> np.ndarray:
        """Returns the values in `box`. Reads complete rows, in strips, and keeps the columns of the box.

        Raises:
          UserError: the file was truncated after it was opened.
        """
        row, size = math.prod(self.shape[1:]), self.dtype.itemsize
        values = np.empty([cut.stop - cut.start for cut in box], f"u{size}")  # NumPy cannot read bfloat16 from files
        step = max(1, _STRIP // (row * size))
        for first in range(box[0].start, box[0].stop, step):
            rows = min(step, box[0].stop - first)
            strip = np.fromfile(self.path, values.dtype, rows * row, offset=self.start + first * row * size)
            if len(strip) < rows * row:
                raise UserError(f"{self.path}: the file ends within its tensors")
            at = first - box[0].start
            values[at : at + rows] = strip.reshape(rows, *self.shape[1:])[(slice(None), *box[1:])]
        return values.view(self.dtype)

    @property
    def shown_dtype(self) -> np.dtype | None:
        """The dtype of the values that `all_values` returns; None if they cannot be displayed."""
        return _SHOWN.get(self.kind)

    def all_values(self) -> np.ndarray:
        """Returns all values.

        Raises:
          UserError: the file was truncated after it was opened, or `shown_dtype` is None.
        """
        dtype = self.shown_dtype
        if dtype is None:
            raise UserError(f"{self.path}: values of dtype {self.kind} cannot be read; norms=false shows the rest")
        found = np.fromfile(self.path, f"u{dtype.itemsize}", math.prod(self.shape), offset=self.start)
        if found.size < math.prod(self.shape):
            raise UserError(f"{self.path}: the file ends within its tensors")
        return found.view(dtype).reshape(self.shape)


class TensorPart(NamedTuple):
    """Some entries of a tensor along an axis, with the interface of `StoredTensor`.

    Attributes:
      tensor: the whole tensor, with the same interface.
      cut: the indices of the entries, in increasing order.
    """

    tensor: Any
    axis: int
    cut: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        shape[self.axis] = len(self.cut)
        return tuple(shape)

    @property
    def kind(self) -> str:
        return self.tensor.kind

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> np.ndarray:
        asked = self.cut[box[self.axis]]
        read = slice(int(asked[0]), int(asked[-1]) + 1) if len(asked) else slice(0, 0)
        values = self.tensor.read((*box[: self.axis], read, *box[self.axis + 1 :]))
        return values if len(asked) == values.shape[self.axis] else values.take(asked - read.start, self.axis)


def file_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata in a file's header: a dict from names to texts. Raises the same errors as
    `stored_tensors`."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return file.metadata() or {}


def header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a file. The bytes of `tensors` must follow, in the same order."""
    parts: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        parts[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(parts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name, without reading them.

    Raises:
      OSError, safetensors.SafetensorError: the file cannot be read, or its header does not fit its tensors.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np"), path.open("rb") as file:  # the library checks the header
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path,
            it["dtype"],
            tuple(it["shape"]),
            8 + length + it["data_offsets"][0],
            it["data_offsets"][1] - it["data_offsets"][0],
        )
        for name, it in header.items()
    }


class SafetensorsFile:
    """A safetensors file whose tensors can be written in any order."""

    def __init__(self, path: Path, tensors: Tensors):
        begin = header(tensors, {"format": "pt"})
        self._offsets: dict[str, tuple[int, int]] = {}
        end = len(begin)
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            self._offsets[name] = (start, end)
        self._file = path.open("wb")
        self._file.write(begin)
        self._file.truncate(end)

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes one tensor, which must have the shape and dtype in the header."""
        start, end = self._offsets[name]
        assert value.nbytes == end - start, name
        self._file.seek(start)
        self._file.write(np.ascontiguousarray(value).view(np.uint8).data)

    def copy(self, name: str, tensor: StoredTensor) -> None:
        """Copies a tensor from another file, in strips. The tensor must have the shape and dtype in the header.

        Raises:
          UserError: the other file was truncated after it was opened.
        """
        start, end = self._offsets[name]
        assert tensor.nbytes == end - start, name
        self._file.seek(start)
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            for at in range(start, end, _STRIP):
                strip = file.read(min(_STRIP, end - at))
                if len(strip) < min(_STRIP, end - at):
                    raise UserError(f"{tensor.path}: the file ends within its tensors")
                self._file.write(strip)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Closes the file. Syncs it to disk first, unless there was an error."""
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

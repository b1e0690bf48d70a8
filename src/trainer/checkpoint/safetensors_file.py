"""Safetensors files, written tensor by tensor. The library's own writer wants all of a file's tensors at once."""

import json
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Tensors = dict[str, tuple[tuple[int, ...], np.dtype]]  # name: (shape, dtype)


class SafetensorsFile:
    """A safetensors file whose tensors are written in any order.

    The format: the header's length as 8 bytes, little-endian; the header, JSON; then the bytes of the tensors in C
    order (https://huggingface.co/docs/safetensors, "Format").
    """

    def __init__(self, path: Path, tensors: Tensors):
        self._offsets: dict[str, tuple[int, int]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + int(np.prod(shape)) * dtype.itemsize
            self._offsets[name] = (start, end)
            header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes one tensor, of the shape and dtype that the header says."""
        start, end = self._offsets[name]
        assert value.nbytes == end - start, name
        self._file.seek(self._start + start)
        self._file.write(np.ascontiguousarray(value).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Ends the file; unless an error ended the writing, it is on the disk then."""
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

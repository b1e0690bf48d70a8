"""Reads the header of a GGUF file: the model's metadata, and the offsets of its tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is checked against the
file size before it is used. The package gguf lacks this check: if a damaged file claims an array of 2^33 values, the
package loops over all of them.
"""

import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.limits import FILE_BYTES, GGUF_AXES, GGUF_ENTRIES, GGUF_NAME_BYTES, GGUF_STRINGS
from trainer.config.words import visible

_MAGIC, _VERSIONS = b"GGUF", (2, 3)  # version 1, with its four-byte counts, is not supported
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
# Maps the number of each numeric value type to the type's format code in Python's struct and NumPy.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", list: "a list of texts"}


class Described(NamedTuple):
    """A tensor as described in the header.

    Attributes:
      kind: the number of its ggml type.
      shape: slowest axis first; the file stores the reverse order.
      start: the offset of its first byte in the file.
    """

    kind: int
    shape: tuple[int, ...]
    start: int


class GgufHeader(NamedTuple):
    """The header of a GGUF file.

    Attributes:
      path: the file.
      values: the metadata, a dict whose values are a bool, int, float, str, NumPy array of numbers, or list of str.
      tensors: a dict from tensor names to descriptions of the tensors.
      size: the file size in bytes.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, Described]
    size: int

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns the value of `key`, or `default` if the key is missing.

        `kind` is the required type: int, float (which also accepts an int), str, bool, list (of str) or np.ndarray.

        Raises:
          UserError: the value has a different type, or is a float that is not finite.
        """
        if (value := self.values.get(key)) is None:
            return default
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not fits or (kind is float and not math.isfinite(value)):
            raise UserError(f"{self.path}: {key} is not {_WORDS.get(kind, 'a list of numbers')}")
        return value


def read_gguf(path: Path) -> GgufHeader:
    """Returns the header of the file `path`, which may be a link and need not end in .gguf (Ollama's files do not).

    Raises:
      UserError: the file is not a readable GGUF file, or is damaged.
    """
    if not path.is_file():  # opening a pipe would wait forever
        raise UserError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _Reader(path, file, size).header()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as GGUF: {error}") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int):
        self._path, self._file, self._size = path, file, size
        # `_left`: how many bytes may still be read. `size` alone is no limit: a sparse file can be far larger than any
        # header.
        self._left, self._strings = min(size, FILE_BYTES), 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != _MAGIC:
            self._refuse("this is not a GGUF file")
        if (version := self._number("I")) not in _VERSIONS:
            self._refuse(
                f"GGUF version {version}, or a big-endian file; only little-endian versions 2 and 3 are supported"
            )
        count, keys = self._number("Q"), self._number("Q")
        self._check(count, GGUF_ENTRIES, 8, "tensors")
        self._check(keys, GGUF_ENTRIES, 8, "keys")
        values = self._entries(keys, self._value, "the key")
        described = self._entries(count, self._described, "the tensor")
        alignment = values.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self._refuse(f"{_ALIGNMENT} is not a power of two between 8 and 2^20")
        start = -(-self._file.tell() // alignment) * alignment
        tensors = {}
        for name, (kind, shape, offset) in described.items():
            if offset % alignment or start + offset > self._size:
                self._refuse(
                    f"{shortened(visible(name))} has offset {offset}, which is outside the file or not aligned"
                )
            tensors[name] = Described(kind, shape, start + offset)
        return GgufHeader(self._path, values, tensors, self._size)

    def _entries(self, count: int, read: Callable[[], Any], what: str) -> dict[str, Any]:
        found = dict[str, Any]()
        for _ in range(count):
            name = self._string(GGUF_NAME_BYTES)
            if name in found:
                self._refuse(f"{what} {shortened(visible(name))} occurs twice")
            found[name] = read()
        return found

    def _described(self) -> tuple[int, tuple[int, ...], int]:
        axes = self._number("I")
        if not 1 <= axes <= GGUF_AXES:
            self._refuse(f"a tensor has {axes} axes; 1 to {GGUF_AXES} are allowed")
        sizes = tuple(self._number("Q") for _ in range(axes))
        if not min(sizes) or math.prod(sizes) > self._size * 8:  # every type has at least one bit per value
            self._refuse(f"a tensor of {' x '.join(map(str, sizes))} values does not fit into {self._size:,} bytes")
        return self._number("I"), sizes[::-1], self._number("Q")

    def _value(self) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._numbers(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._strings += count
            self._check(self._strings, GGUF_STRINGS, 0, "texts")
            self._check(count, GGUF_STRINGS, 8, "texts")
            return [self._string() for _ in range(count)]
        dtype = np.dtype(f"<{self._numbers(kind)}")
        self._check(count, FILE_BYTES, dtype.itemsize, "numbers")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _numbers(self, kind: int) -> str:
        if kind not in _NUMBERS:  # this includes arrays of arrays, which no published file has
            self._refuse(f"a metadata value has the unknown type {kind}")
        return _NUMBERS[kind]

    def _string(self, most: int = FILE_BYTES) -> str:
        length = self._number("Q")
        self._check(length, most, 1, "bytes of a text")
        return self._bytes(length).decode("utf-8")

    def _number(self, form: str) -> Any:
        form = f"<{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _check(self, count: int, most: int, each: int, what: str) -> None:
        if count > most or count * each > self._left:
            self._refuse(f"it claims {count:,} {what}, more than fit into the file or than the limit of {most:,}")

    def _bytes(self, count: int) -> bytes:
        self._left -= count
        data = self._file.read(count) if self._left >= 0 else b""
        if len(data) < count:
            self._refuse("the file ends within its header, or its header is too long")
        return data

    def _refuse(self, why: str) -> None:
        raise UserError(f"{self._path}: {why}")

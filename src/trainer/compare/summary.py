"""Summaries of a record's arrays. A summary contains a checksum and a few statistics of each layer.

A record contains the values themselves only if it was written with `arrays=true`.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class LayerSummary(NamedTuple):
    """The summary of one layer of an array, or of the complete array.

    Attributes:
      digest: the checksum of the bytes; see the function `digest`.
      largest: the largest magnitude of the finite elements.
      rms: the root mean square of the finite elements.
      odd: the number of elements that are not finite.
    """

    digest: str
    largest: float
    rms: float
    odd: int

    def __str__(self) -> str:
        odd = f", {self.odd} not finite" if self.odd else ""
        return f"rms {self.rms:.6g}, largest {self.largest:.6g}{odd}"


@dataclass(frozen=True)
class Summary:
    """The summary of an array in a record. `layers`: the numbers of the layers along the array's first axis; None if
    the array is not stacked. `read`: a function that returns the array's values; None if the record does not contain
    the values."""

    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] | None
    parts: tuple[LayerSummary, ...]
    read: Callable[[], np.ndarray] | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def summarize(array: np.ndarray, layers: Iterable[int] | None) -> Summary:
    """Returns the summary of an array on the host."""
    numbers = numbered(array, layers)
    return Summary(array.shape, str(array.dtype), numbers, tuple(map(part, cut(array, numbers))))


def numbered(array: np.ndarray, layers: Iterable[int] | None) -> tuple[int, ...] | None:
    """Returns the numbers of the layers along the first axis of `array`. Returns None if `layers` is None or too short,
    or if `array` has no axes."""
    numbers = tuple(itertools.islice(layers, len(array))) if layers is not None and array.ndim else ()
    return numbers if numbers and len(numbers) == len(array) else None


def cut(array: np.ndarray, layers: tuple[int, ...] | None) -> Iterable[np.ndarray]:
    """Returns the parts of an array that are compared separately: its layers, or the complete array."""
    return (array,) if layers is None else array


def part(array: np.ndarray) -> LayerSummary:
    """Returns the summary of a layer or a complete array."""
    values = np.abs(np.asarray(array).astype(np.float64))
    finite = np.isfinite(values)
    kept = values if finite.all() else values[finite]
    rms = math.sqrt(float(np.mean(np.square(kept)))) if kept.size else 0.0
    return LayerSummary(digest(array), float(kept.max(initial=0.0)), rms, int(values.size - kept.size))


def digest(array: np.ndarray) -> str:
    """Returns the first 128 bits of the SHA-256 of an array's bytes in C order, in hexadecimal."""
    # A view, because Python's buffers do not support bfloat16.
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.sha256(flat.data).hexdigest()[:32]

"""4-bit or 8-bit integers that are packed into int32, and matrices that are stored transposed."""

from typing import NamedTuple, Protocol

import numpy as np

from trainer.leaves.source import Box
from trainer.models.huggingface import transposed
from trainer.weights.huggingface.safetensors_file import StoredTensor

WORD = 32  # bits
# The position in an AWQ word of each of eight consecutive integers, because AWQ's GPU kernels unpack integers in pairs.
# The inverse permutation is 0 2 4 6 1 3 5 7.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Readable(Protocol):
    """A matrix that is read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]; for scales and zero points, the numbers of blocks along these axes."""

    def read(self, box: Box) -> np.ndarray:
        """Returns the values in `box`."""


class Turned(NamedTuple):
    """The transpose of a stored matrix."""

    tensor: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[::-1]

    def read(self, box: Box) -> np.ndarray:
        return transposed(self.tensor.read(box[::-1]))


class Words(NamedTuple):
    """4-bit or 8-bit integers packed into int32, the first in the lowest bits. An integer q is stored as q + 2**(bits -
    1).

    Attributes:
      tensor: int32, two axes.
      shape: the shape of the unpacked matrix; see `Readable.shape`. The end of the last word may be unused.
      bits: 4 or 8.
      axis: the axis of `tensor` along which words are unpacked.
      turned: whether `tensor` is stored as the transpose of the unpacked matrix.
      order: the position in a word of each integer; empty: in order.
      less_one: see `Scheme.less_one`.
    """

    tensor: StoredTensor
    shape: tuple[int, ...]
    bits: int
    axis: int = 1
    turned: bool = False
    order: tuple[int, ...] = ()
    less_one: str = ""

    def read(self, box: Box) -> np.ndarray:
        """Returns the values in `box`, as int8."""
        per = WORD // self.bits
        cuts = list(box[::-1] if self.turned else box)
        cut = cuts[self.axis]
        cuts[self.axis] = slice(cut.start // per, -(-cut.stop // per))
        words = self.tensor.read(tuple(cuts)).view(np.uint32)
        if self.axis == 0:
            words = transposed(words)
        if self.less_one == "word":
            words = words + np.uint32(sum(1 << self.bits * i for i in range(per)))
        values = _unpacked(np.ascontiguousarray(words), self.bits)
        if self.less_one == "each":
            values = values + np.uint8(1) & np.uint8((1 << self.bits) - 1)
        if self.order:
            values = values.reshape(len(values), -1, per)[..., self.order].reshape(len(values), -1)
        first = cut.start % per
        values = values[:, first : first + cut.stop - cut.start] - np.uint8(1 << self.bits - 1)
        values = values.view(np.int8)
        return transposed(values) if (self.axis == 0) != self.turned else values


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks words, uint32 [rows, n], to unsigned integers, uint8 [rows, n * 32 / bits]."""
    octets = words.astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    values = np.empty((len(octets), 2 * octets.shape[1]), np.uint8)
    values[:, 0::2] = octets & 15
    values[:, 1::2] = octets >> 4
    return values


def packed_words(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs int8 values [rows, n] into int32 words [rows, ceil(n * bits / 32)]: the inverse of `Words`."""
    rows, count = values.shape
    unsigned = np.zeros((rows, -(-count * bits // WORD) * WORD // bits), np.uint8)
    unsigned[:, :count] = values.view(np.uint8) + np.uint8(1 << bits - 1)
    octets = unsigned if bits == 8 else unsigned[:, 0::2] | unsigned[:, 1::2] << 4
    return np.ascontiguousarray(octets).view("<i4").astype(np.int32, copy=False)

"""How Hugging Face's transformers names and shapes the parameters of a family: what the families' tables consist of.

A family's table stands in the family's own file.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Where one parameter lies in a Hugging Face checkpoint.

    Attributes:
      name: of the tensor, with {} for the number of the layer.
      inputs: 0: the tensor has our shape. Otherwise it is a matrix [out, in], and our kernel's first `inputs` axes are
        its inputs.
      turned: the last axis is a head's entries that rotary positions turn: two halves there, with
        `rope_interleave` adjacent pairs here.
    """

    name: str
    inputs: int = 0
    turned: bool = False

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, of one layer, for our shape of one layer."""
        return (math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])) if self.inputs else ours

    def widened(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
        """`box` of one layer of our `shape`, made larger until it is a box of the tensor and holds all that turns."""
        outer = {0, self.inputs} if self.inputs else set(range(len(shape)))
        if self.turned:
            outer -= {len(shape) - 1}
        return tuple(cut if axis in outer else slice(0, shape[axis]) for axis, cut in enumerate(box))

    def box(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
        """The box of the tensor that holds `box`, a widened one, of our `shape`."""
        if not self.inputs:
            return box
        rows, columns = math.prod(shape[self.inputs + 1 :]), math.prod(shape[1 : self.inputs])
        out, into = box[self.inputs], box[0]
        return slice(out.start * rows, out.stop * rows), slice(into.start * columns, into.stop * columns)

    def to_ours(self, theirs: np.ndarray, shape: tuple[int, ...], interleave: bool) -> np.ndarray:
        """The parameter of `shape` for one layer, or a widened box of it."""
        ours = transposed(theirs).reshape(shape) if self.inputs else theirs
        return pairs_of_halves(ours) if self.turned and interleave else ours

    def to_theirs(self, ours: np.ndarray, interleave: bool) -> np.ndarray:
        """The inverse of `to_ours`: the tensor of one layer."""
        if self.turned and interleave:
            ours = halves_of_pairs(ours)
        return transposed(ours.reshape(math.prod(ours.shape[: self.inputs]), -1)) if self.inputs else ours


class HuggingFace(NamedTuple):
    """A family as Hugging Face's transformers have it.

    Attributes:
      model_type, architecture: Hugging Face's names of it.
      layouts: by canonical name.
      defaults: of config.json's keys, where absent.
      qk_norm: it norms queries and keys; otherwise it can not.
      window: "": it has none; "given": every layer, unless sliding_window is null; "switched": layers from
        max_window_layers on, where use_sliding_window is true.
      whole_heads: hidden_size must be a multiple of the number of heads.
    """

    model_type: str
    architecture: str
    layouts: Mapping[str, Layout]
    defaults: Mapping[str, Any]
    qk_norm: bool = False
    window: Literal["", "given", "switched"] = ""
    whole_heads: bool = False


def transposed(matrix: np.ndarray) -> np.ndarray:
    """A contiguous copy of `matrix.T`.

    In strips, of which a cache line is filled at once: five times as fast as NumPy's copy of the whole.
    """
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    unsigned = f"u{matrix.dtype.itemsize}"  # bfloat16 as it is copies entry by entry
    source, target = matrix.view(unsigned), result.view(unsigned)
    for row in range(0, matrix.shape[0], 16):
        target[:, row : row + 16] = source[row : row + 16].T
    return result


def pairs_of_halves(x: np.ndarray) -> np.ndarray:
    """The last axis (a_0 ... a_n, b_0 ... b_n) as (a_0, b_0, ... a_n, b_n)."""
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def halves_of_pairs(x: np.ndarray) -> np.ndarray:
    """The inverse of `pairs_of_halves`."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)

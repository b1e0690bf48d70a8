"""The tables of a family's names and shapes in Hugging Face's transformers.

Each family's file has its table.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

EXPERT = "<expert>"  # in the name of a tensor: the number of the expert


class Layout(NamedTuple):
    """The tensors of one parameter in a Hugging Face checkpoint.

    Attributes:
      name: of the tensor, with {} for the number of the layer. With `EXPERT` in it the first axis of our parameter of
        one layer is that of the experts, each of which has its own tensor: all else is about the parameter of one.
      inputs: 0: the tensor has our shape. Otherwise it is a matrix [out, in], and our kernel's first `inputs` axes are
        its inputs.
      turned: the last axis is a head's entries that RoPE rotates: two halves there; here adjacent pairs with
        `rope_interleave`.
    """

    name: str
    inputs: int = 0
    turned: bool = False

    @property
    def of_experts(self) -> bool:
        """Whether each expert has its own tensor."""
        return EXPERT in self.name

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, of one layer, for our shape of one layer."""
        return (math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])) if self.inputs else ours

    def widened(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
        """`box` of one layer of our `shape`, enlarged to a box of the tensor that contains complete rotated axes."""
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
    """A family in Hugging Face's transformers.

    Attributes:
      model_type, architecture: its names there.
      layouts: by canonical name.
      defaults: of config.json's keys, where absent.
      qk_norm: whether it normalizes queries and keys.
      window: "": it has none; "given": every layer, unless sliding_window is null; "switched": layers from
        max_window_layers on, where use_sliding_window is true.
      whole_heads: hidden_size must be a multiple of the number of heads.
      sizes: further keys of ours, and the fields of config.json that give them.
      latent: its attention is multi-head latent attention.
      only: fields that may be absent or have this value: no other can be represented.
    """

    model_type: str
    architecture: str
    layouts: Mapping[str, Layout]
    defaults: Mapping[str, Any]
    qk_norm: bool = False
    window: Literal["", "given", "switched"] = ""
    whole_heads: bool = False
    sizes: Mapping[str, str] = {}
    only: Mapping[str, Any] = {}
    latent: bool = False


def transposed(matrix: np.ndarray) -> np.ndarray:
    """A contiguous copy of `matrix.T`.

    It copies strips that fill complete cache lines, five times as fast as NumPy's copy.
    """
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    unsigned = f"u{matrix.dtype.itemsize}"  # NumPy copies bfloat16 entry by entry
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

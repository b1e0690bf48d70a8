"""Types for the parameter-name maps and shapes of a family in Hugging Face's transformers.

The map of each family is in the family's file.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from trainer.config import Config

EXPERT = "<expert>"  # stands for the number of the expert in the name of a tensor


_SAME = {"softmax": ""}  # values of routed_score_func with the same meaning


class Layout(NamedTuple):
    """The tensors of one parameter in a Hugging Face checkpoint.

    Attributes:
      name: the name of the tensor, with {} for the number of the layer. If it contains `EXPERT`, each expert has its
        own tensor, and the first axis of our parameter of one layer is experts. All other attributes then describe the
        parameter of one expert.
      inputs: 0 if the tensor has our shape. Otherwise the tensor is a matrix [out, in], and the first `inputs` axes of
        our kernel are its inputs.
      turned: whether RoPE rotates the entries of the last axis. Hugging Face stores them as two halves; this trainer
        stores adjacent pairs if `rope_interleave` is set.
    """

    name: str
    inputs: int = 0
    turned: bool = False

    @property
    def of_experts(self) -> bool:
        """Whether each expert has its own tensor."""
        return EXPERT in self.name

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor of one layer, given our shape of one layer."""
        return (math.prod(ours[self.inputs :]), math.prod(ours[: self.inputs])) if self.inputs else ours

    def widened(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns `box`, a box of one layer of our `shape`, enlarged such that the tensor's box contains complete
        rotated axes."""
        outer = {0, self.inputs} if self.inputs else set(range(len(shape)))
        if self.turned:
            outer -= {len(shape) - 1}
        return tuple(cut if axis in outer else slice(0, shape[axis]) for axis, cut in enumerate(box))

    def box(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the box of the tensor that holds `box`, a widened box of our `shape`."""
        if not self.inputs:
            return box
        rows, columns = math.prod(shape[self.inputs + 1 :]), math.prod(shape[1 : self.inputs])
        out, into = box[self.inputs], box[0]
        return slice(out.start * rows, out.stop * rows), slice(into.start * columns, into.stop * columns)

    def to_ours(self, theirs: np.ndarray, shape: tuple[int, ...], interleave: bool) -> np.ndarray:
        """Returns our parameter of one layer, or a widened box of it, with `shape`."""
        ours = transposed(theirs).reshape(shape) if self.inputs else theirs
        return pairs_of_halves(ours) if self.turned and interleave else ours

    def to_theirs(self, ours: np.ndarray, interleave: bool) -> np.ndarray:
        """Returns the tensor of one layer; the inverse of `to_ours`."""
        if self.turned and interleave:
            ours = halves_of_pairs(ours)
        return transposed(ours.reshape(math.prod(ours.shape[: self.inputs]), -1)) if self.inputs else ours


class HuggingFace(NamedTuple):
    """A family in Hugging Face's transformers.

    Attributes:
      model_type, architecture: the family's names there.
      layouts: the layout of each parameter, by canonical name.
      defaults: values of absent fields of config.json.
      qk_norm: whether the family normalizes queries and keys.
      window: "": no sliding window; "given": in every layer, unless sliding_window is null; "switched": in the layers
        from max_window_layers on, if use_sliding_window is true.
      whole_heads: whether hidden_size must be a multiple of the number of heads.
      sizes: further keys of this trainer, each with the field of config.json that gives its value.
      latent: whether the attention is multi-head latent attention.
      only: fields that must be absent or have this value, because no other value can be represented.
      implies: keys of this trainer that have this value in every model of this type.
      aliases: other model types with the same fields and tensors.
      methods: with `latent`, the values of topk_method for experts that are not grouped and for grouped ones.
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
    implies: Mapping[str, Any] = {}
    aliases: Sequence[str] = ()
    methods: tuple[str, str] = ("", "")

    def contradicted(self, config: Config) -> list[str]:
        """Returns the keys of `implies` that have another value in `config`."""
        return [key for key, value in self.implies.items() if _SAME.get(config[key], config[key]) != value]


def transposed(matrix: np.ndarray) -> np.ndarray:
    """Returns a contiguous copy of `matrix.T`.

    Copies strips that fill complete cache lines, which is five times as fast as NumPy's copy.
    """
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    unsigned = f"u{matrix.dtype.itemsize}"  # as integers, because NumPy copies bfloat16 entry by entry
    source, target = matrix.view(unsigned), result.view(unsigned)
    for row in range(0, matrix.shape[0], 16):
        target[:, row : row + 16] = source[row : row + 16].T
    return result


def pairs_of_halves(x: np.ndarray) -> np.ndarray:
    """Reorders the last axis from (a_0 ... a_n, b_0 ... b_n) to (a_0, b_0, ... a_n, b_n)."""
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def halves_of_pairs(x: np.ndarray) -> np.ndarray:
    """Reorders the last axis back; the inverse of `pairs_of_halves`."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)

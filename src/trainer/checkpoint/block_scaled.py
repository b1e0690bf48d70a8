"""Block-scaled 8-bit weights, as in the files of DeepSeek-V3.

A float8 matrix `X.weight` [out, in] has a companion `X.weight_scale_inv` [ceil(out / rows), ceil(in / columns)]. A
weight is its float8 value times the scale of its block (arXiv:2412.19437, section 3.3.2, and the published conversion
script).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.checkpoint.safetensors_file import DTYPES, FLOAT8, Box, StoredTensor
from trainer.config import UserError

_SCALES = "_scale_inv"
_LARGEST = 20  # the maximum number of lines in a message


class ScaledTensor(NamedTuple):
    """A float8 matrix with its scales, with the interface of `StoredTensor`. Its values are float32."""

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    @property
    def kind(self) -> str:
        """See `StoredTensor`."""
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """See `StoredTensor`."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """See `StoredTensor`."""
        return np.dtype(np.float32)

    def read(self, box: Box) -> np.ndarray:
        """See `StoredTensor.read`."""
        outer = tuple(slice(c.start // b, -(-c.stop // b)) for c, b in zip(box, self.block, strict=True))
        result = self.values.read(box).astype(np.float32)
        scales = self.scales.read(outer).astype(np.float32)
        for axis, (cut, size) in enumerate(zip(box, self.block, strict=True)):
            scales = scales.take(np.arange(cut.start, cut.stop) // size - cut.start // size, axis)
        result *= scales
        return result


def with_scales(
    tensors: Mapping[str, StoredTensor], block: tuple[int, int], where: Path
) -> dict[str, StoredTensor | ScaledTensor]:
    """Returns `tensors` with each float8 matrix combined with its scales. Tensors without a partner are unchanged.

    Raises:
      UserError: the shape of some scales does not fit `block` (rows, columns).
    """
    joined: dict[str, StoredTensor | ScaledTensor] = dict(tensors)
    problems = []
    for name, tensor in tensors.items():
        scales = tensors.get(name + _SCALES)
        if tensor.kind != FLOAT8 or scales is None or scales.kind not in DTYPES or len(tensor.shape) != 2:
            continue
        wanted = tuple(-(-size // part) for size, part in zip(tensor.shape, block, strict=True))
        if scales.shape != wanted:
            problems.append(f"{name}{_SCALES}: found {list(scales.shape)}, wanted {list(wanted)}")
        joined[name] = ScaledTensor(tensor, scales, block)
        del joined[name + _SCALES]
    if problems:
        head = f"{where}: scales that do not fit blocks of {block[0]} x {block[1]} weights:"
        raise UserError("\n  ".join([head, *problems[:_LARGEST]]))
    return joined

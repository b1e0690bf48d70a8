"""MXFP4 (OCP Microscaling Formats 1.0), the format in which transformers stores gpt-oss's experts. Its values are read
as bfloat16, which represents all of them exactly."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.leaves.source import Box
from trainer.weights.huggingface.safetensors_file import StoredTensor

CODES, SCALES = "_blocks", "_scales"  # suffixes of the names of the two tensors
BYTES = 16  # bytes of a block: 32 codes, two per byte, the first in the lower bits
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_HALF, -_HALF])
_BIAS = 127


class Blocks(NamedTuple):
    """Matrices [experts, in, out], stored as codes [experts, out, blocks, BYTES] and scales [experts, out, blocks].

    The class has the interface of `StoredTensor`. A block has 32 consecutive inputs; if s is its stored scale, its
    values are multiplied by 2 ** (s - 127)."""

    codes: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out, blocks, _ = self.codes.shape
        return experts, 2 * BYTES * blocks, out

    @property
    def kind(self) -> str:
        """The type of the values; see `StoredTensor`."""
        return "BF16"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16)

    def read(self, box: Box) -> np.ndarray:
        """See `StoredTensor.read`. Reads one expert at a time to limit the memory for temporary indices and float32
        values."""
        experts, inputs, out = box
        values = np.empty([cut.stop - cut.start for cut in box], self.dtype)
        for i, value in enumerate(values):
            value[...] = self._read_one(slice(experts.start + i, experts.start + i + 1), inputs, out)
        return values

    def _read_one(self, expert: slice, inputs: slice, out: slice) -> np.ndarray:
        size = 2 * BYTES
        blocks = slice(inputs.start // size, -(-inputs.stop // size))
        codes = self.codes.read((expert, out, blocks, slice(0, BYTES)))
        scales = self.scales.read((expert, out, blocks)).astype(np.int32) - _BIAS
        values = _VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*scales.shape, size)
        values = np.ldexp(values, scales[..., None]).astype(self.dtype)
        first = inputs.start - blocks.start * size
        return values.reshape(scales.shape[1], -1)[:, first : first + inputs.stop - inputs.start].T


def with_blocks(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns `tensors` with each pair of codes and scales replaced by a `Blocks`, under their common name without
    suffix.

    Raises:
      UserError: lists pairs that are incomplete or do not fit together.
    """
    found: dict[str, Any] = {}
    problems = []
    for name, tensor in tensors.items():
        whole, _, end = name.rpartition("_")
        if f"_{end}" == SCALES and whole + CODES in tensors:
            continue
        if f"_{end}" != CODES:
            found[name] = tensor
            continue
        scales = tensors.get(whole + SCALES)
        if scales is None or len(tensor.shape) != 4 or tensor.shape != (*scales.shape, BYTES):
            has = None if scales is None else list(scales.shape)
            problems.append(
                f"{shortened(name)}: {list(tensor.shape)} with scales {has}, wanted [..., {BYTES}] and [...]"
            )
        elif (tensor.kind, scales.kind) != ("U8", "U8"):
            problems.append(f"{shortened(name)}: stored as {tensor.kind} with scales {scales.kind}, wanted U8")
        else:
            found[whole] = Blocks(tensor, scales)
    if problems:
        raise UserError("\n  ".join(["tensors that are not valid MXFP4:", *problems]))
    return found

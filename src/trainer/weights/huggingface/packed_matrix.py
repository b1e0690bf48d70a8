"""A quantized matrix in a Hugging Face folder.

The docstring of `trainer.weights.huggingface.packed` lists the tensors that store it.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.config.errors import UserError
from trainer.leaves.source import Box
from trainer.weights.huggingface.packed_words import Readable
from trainer.weights.huggingface.quantization_config import Scheme
from trainer.weights.huggingface.safetensors_file import StoredTensor, TensorPart


class PackedMatrix(NamedTuple):
    """A quantized matrix, with the interface of `StoredTensor`. Its values are float32.

    Attributes:
      name: the name of the float tensor in an unquantized folder.
      codes: int8 or float8_e4m3fn [out, in].
      scales: one scale per block, [blocks of outputs, blocks of inputs].
      zeros: one zero point per block, in the range of the codes; None if the folder has no zero points.
      groups: int [in], the group of each input; None if each group consists of consecutive inputs.
      block: the numbers of outputs and of inputs that share a scale.
      scheme: how the matrix is stored.
      where: the path of its folder.
    """

    name: str
    codes: Readable
    scales: Readable
    zeros: Readable | None
    groups: StoredTensor | None
    block: tuple[int, int]
    scheme: Scheme
    where: Path

    @property
    def kind(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def kind_of_codes(self) -> str:
        """The type of the codes: "int4", "int8" or "fp8"."""
        return self.scheme.kind

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return self.scheme.bits

    def read(self, box: Box) -> np.ndarray:
        """See `StoredTensor.read`.

        Raises:
          UserError: a file was truncated, or groups or zero points contradict the scheme.
        """
        tiles, columns = self._tiles(box), self._groups(box[1])
        if columns is None:
            columns = _places(box[1], self.block[1])
        else:
            tiles = (tiles[0], slice(0, self.scales.shape[1]))
        rows = _places(box[0], self.block[0])
        values = self.codes.read(box).astype(np.float32)
        if self.zeros is not None:
            values -= _spread(self._zero_points(tiles), rows, columns)
        values *= _spread(self.scales.read(tiles), rows, columns)
        return values

    def parts(self, box: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns (codes in `box`, scales, zero points). Scales (float32) and zero points are returned for all blocks
        that overlap `box`. Zero points are None if all of them are 0.

        Raises:
          UserError: a file was truncated, or inputs that share a scale are not consecutive.
        """
        scales, zeros = self.scales_and_zeros(box)
        return self.codes.read(box), scales, zeros

    def scales_and_zeros(self, box: Box) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the scales and the zero points that `parts` returns, without reading codes."""
        if not self.in_order:
            raise UserError(f"{self.name}: its groups are in the order of activations (desc_act), not of inputs")
        tiles = self._tiles(box)
        zeros = None if self.zeros is None else self._zero_points(tiles)
        if zeros is not None and not zeros.astype(np.float32).any():
            zeros = None
        return self.scales.read(tiles).astype(np.float32), zeros

    def outputs(self, cut: np.ndarray) -> "PackedMatrix":
        """Returns the submatrix of the outputs at the increasing indices `cut`.

        Raises:
          UserError: `cut` separates outputs that share a scale.
        """
        out, rows, columns = self.shape[0], *self.block
        tiles = np.unique(cut // rows)
        if rows >= out:  # all outputs share scales
            rows = len(cut)
        elif len(cut) != (np.minimum(tiles * rows + rows, out) - tiles * rows).sum():
            raise UserError(
                f"{self.where}: {self.name}: {rows} outputs share a scale, but belong to several parameters"
            )
        zeros = None if self.zeros is None else TensorPart(self.zeros, 0, tiles)
        codes, scales = TensorPart(self.codes, 0, cut), TensorPart(self.scales, 0, tiles)
        return self._replace(codes=codes, scales=scales, zeros=zeros, block=(rows, columns))

    @property
    def in_order(self) -> bool:
        """Whether inputs that share a scale are consecutive."""
        into = slice(0, self.shape[1])
        columns = self._groups(into)
        return columns is None or bool((columns == np.arange(into.stop) // self.block[1]).all())

    @property
    def has_zeros(self) -> bool:
        """Whether any zero point is not 0."""
        if self.zeros is None:
            return False
        return bool(self._zero_points(tuple(slice(0, size) for size in self.zeros.shape)).astype(np.float32).any())

    def _tiles(self, box: Box) -> Box:
        return tuple(slice(c.start // size, -(-c.stop // size)) for c, size in zip(box, self.block, strict=True))

    def _groups(self, cut: slice) -> np.ndarray | None:
        """Returns the group of each input in `cut`; None if each group consists of consecutive inputs."""
        if self.groups is None:
            return None
        found = self.groups.read((slice(0, self.shape[1]),))
        if (found == -1).all():  # in compressed-tensors, -1 means: groups are in order
            return None
        count = self.scales.shape[1]
        if found.min() < 0 or found.max() >= count:
            raise UserError(f"{self.groups.path}: {self.name}: the groups of its inputs are not in [0, {count - 1}]")
        if (most := np.bincount(found).max()) > self.block[1]:
            raise UserError(
                f"{self.groups.path}: {self.name}: {most} inputs are in one group, but config.json says "
                f"group_size={self.block[1]}"
            )
        return found[cut]

    def _zero_points(self, tiles: Box) -> np.ndarray:
        assert self.zeros is not None
        found = self.zeros.read(tiles)
        if not self.scheme.symmetric or not found.astype(np.float32).any():
            return found
        # GPTQ has two formats, whose zero points differ by 1. If zero points of 0 are read in the wrong format, all are
        # 1, or all are -1.
        other = {1: "gptq_v2", -1: "gptq"}.get(int(found[0, 0])) if self.scheme.layout == "gptq" else None
        if other and (found == found[0, 0]).all():
            raise UserError(
                f"{self.where}: {self.name}: its zero points are stored in the {other} format, but the "
                f"quantization_config of config.json has another checkpoint_format; set it to {other}"
            )
        raise UserError(
            f"{self.where}: {self.name}: it has zero points, but the quantization_config of config.json excludes "
            "them (sym, symmetric or zero_point); one of the two is wrong"
        )


def _places(cut: slice, size: int) -> np.ndarray:
    return np.arange(cut.start, cut.stop) // size - cut.start // size


def _spread(tiles: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns, for each weight, the value of the block that contains the weight, as float32. An axis with only one
    block keeps the size 1, which broadcasts."""
    values = tiles.astype(np.float32)
    for axis, places in enumerate((rows, columns)):
        values = values if values.shape[axis] == 1 else values.take(places, axis)
    return values

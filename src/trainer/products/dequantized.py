"""Products with kernels that are stored in quantized form, and the storage formats. Qwix does the quantization.

A kernel is stored as a `qwix.QArray`. Its parts have the kernel's axes: values [*in, *out], and float32 scales with one
entry for each block of inputs and outputs. nf4 codes are stored as `Packed`. A kernel with AWQ scales
(arXiv:2306.00978) is a `qwix.contrib.awq.WithAwqScale`. For experts, each part has a leading axis of groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from typing import Any

import flax
import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from qwix._src.core import dot_general, numerics, qarray
from qwix.contrib.awq import WithAwqScale

from trainer.config.errors import UserError
from trainer.products.context import Context
from trainer.products.plain import EarlyReduction, GroupedProduct, Kernel, Product, grouped_product

NF4 = "nf4"
_LEAST = 16  # if a block does not divide an axis, at least this many values must share a scale


@flax.struct.dataclass
class Packed:
    """4-bit codes with their scales. Replaces an nf4 `QArray`, which Orbax cannot store.

    Attributes:
      codes: uint8; each entry stores two consecutive codes along the packed axis, the first in the lower bits.
      scale: see `QArray`.
      axis: the packed axis, counted from the end.
    """

    codes: jax.Array
    scale: jax.Array
    axis: int = flax.struct.field(pytree_node=False)


nnx.register_data_type(Packed)


@dataclass(frozen=True)
class Storage:
    """How a kernel is stored.

    Attributes:
      dtype: the dtype of the values, such as "int8", "float8_e4m3fn" or "nf4".
      block: how many inputs and how many outputs share a scale. 0, or a number larger than the axis, means all. If a
        number does not divide the axis, its greatest common divisor with the axis length is used.
      method: Qwix's calibration method; "minmax" also stores zero points.
      awq: whether inputs have AWQ scales.
    """

    dtype: str
    block: tuple[int, int] = (0, 1)
    method: str = "absmax"
    awq: bool = False

    def how(self, kernel: Kernel, stacked: int = 0) -> qarray.HowToQuantize:
        """Returns Qwix's settings for `kernel` with `stacked` leading axes. Raises UserError if too few values would
        share a scale."""
        first = stacked + bool(kernel.groups)
        inputs, outputs = self.block
        tiles: dict[int, int] = {}
        if inputs:
            tiles |= dict(enumerate(_tiles(kernel, kernel.in_shape, inputs), first))
        if outputs:
            tiles |= dict(enumerate(_tiles(kernel, kernel.out_shape, outputs), first + len(kernel.in_shape)))
        own = [*range(first), *(axis for axis, size in tiles.items() if size == 1)]
        tiles = {axis: size for axis, size in tiles.items() if size > 1}
        dtype = NF4 if self.dtype == NF4 else jnp.dtype(self.dtype)
        return qarray.HowToQuantize(qtype=dtype, channelwise_axes=own, tiled_axes=tiles, calibration_method=self.method)

    def store(self, kernel: Kernel, value: jax.Array, stacked: int = 0) -> Any:
        """Returns `value` [*stacked, *groups, *in, *out] in stored form, rounded to nearest, with AWQ scales of 1."""
        found = packed(qarray.quantize(value.astype(jnp.float32), self.how(kernel, stacked)), kernel)
        inputs = value.shape[: value.ndim - len(kernel.out_shape)]
        return with_awq_scale(found, jnp.ones(inputs, jnp.float32), kernel) if self.awq else found

    def of_inputs(self, kernel: Kernel) -> int:
        """Returns how many inputs of `kernel`, merged into one axis, share a scale; 0: all.

        Raises:
          UserError: see `how`.
        """
        if not self.block[0]:
            return 0
        tiles, first = self.how(kernel).tiled_axes, bool(kernel.groups)
        return prod(tiles.get(axis, 1) for axis in range(first, first + len(kernel.in_shape)))

    def of_matrix(self, kernel: Kernel, value: qarray.QArray, awq_scale: jax.Array | None = None) -> Any:
        """Returns the stored form of a quantized kernel.

        Args:
          value: [*groups, in, out]; the input axes are merged into one axis, and so are the output axes. No two outputs
            share a scale.
          awq_scale: [*groups, in].
        """
        groups, tiles = (kernel.groups,) * bool(kernel.groups), self.how(kernel).tiled_axes if self.block[0] else {}
        counts = [
            size // tiles.get(axis, 1) if self.block[0] else 1 for axis, size in enumerate(kernel.in_shape, len(groups))
        ]

        def parted(part: Any, inputs: Sequence[int]) -> Any:
            return None if part is None else part.reshape(*groups, *inputs, *kernel.out_shape)

        whole = qarray.QArray(
            parted(value.qvalue, kernel.in_shape),
            parted(value.scale, counts),
            parted(value.zero_point, counts),
            value.qtype,
        )
        found = packed(whole, kernel)
        if awq_scale is None:
            return found
        return with_awq_scale(found, awq_scale.reshape(*groups, *kernel.in_shape), kernel)


def with_awq_scale(stored: Any, scale: jax.Array, kernel: Kernel) -> WithAwqScale:
    """Returns `stored` with its AWQ scales [*stacked, *groups, *in], by which its weights were multiplied."""
    outputs = len(kernel.out_shape)
    return WithAwqScale(
        array=stored,
        how=qarray.HowToQuantize(qtype=getattr(stored, "qtype", NF4)),
        awq_scale=scale.reshape(*scale.shape, *[1] * outputs),  # so that it has the kernel's axes
        contracting_axis=-outputs - 1,
    )


def _tiles(kernel: Kernel, shape: Sequence[int], size: int) -> list[int]:
    """Returns the shape of the blocks that share a scale, for axes of the lengths `shape`. A block has `size` entries,
    or fewer if `size` does not fit the axes."""
    if prod(shape) <= size:
        return list(shape)
    tiles, left = [], size
    for length in reversed(shape):
        tile = gcd(length, left)
        left = left // tile if tile == length else 1
        tiles.append(tile)
    found = prod(tiles)
    if found != size and found < min(size, _LEAST):
        raise UserError(
            f"weight_block_size: blocks of {size} do not fit {kernel.name}, with axes of {list(shape)} entries: only "
            f"{found} could share a scale; give another block, or leave the matrix float (unquantized_modules)"
        )
    return tiles[::-1]


def packed(value: qarray.QArray, kernel: Kernel) -> Any:
    """Returns `value` in stored form: nf4 as `Packed`, other dtypes unchanged."""
    if value.qtype != NF4:
        return value
    axis = -len(kernel.out_shape) - 1  # the last input axis
    if value.shape[axis] % 2:
        raise UserError(f"quantization=nf4: {kernel.name} has an odd number of inputs, so its codes cannot be packed")
    codes = value.qvalue.astype(jnp.uint8)
    low, high = (jax.lax.slice_in_dim(codes, i, None, 2, axis % codes.ndim) for i in (0, 1))
    return Packed(low | (high << 4), value.scale, axis)


def _qarray(stored: Any) -> qarray.QArray:
    """Returns a stored kernel without AWQ scales as a `QArray`."""
    if not isinstance(stored, Packed):
        return stored
    axis = stored.axis % stored.codes.ndim
    codes = jnp.stack([stored.codes & 15, stored.codes >> 4], axis + 1).astype(jnp.uint4)
    codes = codes.reshape(*stored.codes.shape[:axis], -1, *stored.codes.shape[axis + 1 :])
    return qarray.QArray(codes, stored.scale, qtype=NF4)


def dequantize(stored: Any, dtype: jnp.dtype) -> jax.Array:
    """Returns the kernel, [*stacked, *groups, *in, *out], in `dtype`."""
    if isinstance(stored, WithAwqScale):
        return (dequantize(stored.array, jnp.dtype(jnp.float32)) / stored.awq_scale).astype(dtype)
    return qwix.dequantize(_qarray(stored).astype(jnp.float32)).astype(dtype)


def is_stored(value: Any) -> bool:
    """Returns whether `value` is a kernel in one of this file's stored forms."""
    return isinstance(value, qarray.QArray | Packed | WithAwqScale)


def float_shape(stored: Any) -> tuple[int, ...]:
    """Returns the shape of a dequantized kernel. The leaves of `stored` are arrays or ShapeDtypeStructs."""
    return jax.eval_shape(partial(dequantize, dtype=jnp.dtype(jnp.float32)), stored).shape


def parameter_count(params: Any) -> int:
    """Returns the number of parameters in a tree. A stored kernel counts its values, without scales."""
    return sum(map(_floats, jax.tree.leaves(params, is_leaf=is_stored)))


def _floats(kernel: Any) -> int:
    if isinstance(kernel, WithAwqScale):
        return _floats(kernel.array)
    if isinstance(kernel, Packed):
        return 2 * prod(kernel.codes.shape)
    # Qwix's subclasses of QArray count like a QArray.
    return prod((kernel.qvalue if isinstance(kernel, qarray.QArray) else kernel).shape)


def dequantized(storage: Storage, kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    """Returns the product for `kernel`, which is stored according to `storage`. `partial(dequantized, storage)` is
    a `MakeProduct`."""
    del rngs
    return _Grouped(storage, kernel) if kernel.groups else _Dense(storage, kernel)


@dataclass(frozen=True)
class _Dense:
    """A `Product`. If there are few rows, or if all inputs of an output share a scale, rows are multiplied with the
    quantized values, and the results are scaled, because XLA on a TPU would write a dequantized kernel to memory, which
    takes 3 to 6 times the bytes of the quantized values. Otherwise, the kernel is dequantized first."""

    storage: Storage
    kernel: Kernel

    def store(self, kernel: jax.Array) -> Any:
        return self.storage.store(self.kernel, kernel)

    def array(self, kernel: Any, dtype: jnp.dtype) -> jax.Array:
        _check(self.kernel, kernel)
        return dequantize(kernel, dtype)

    def __call__(
        self,
        x: jax.Array,
        inputs: int,
        kernel: Any,
        reduce_early: EarlyReduction | None = None,
        context: Context | None = None,
    ) -> jax.Array:
        del reduce_early, context  # the kernel has no gradient
        _check(self.kernel, kernel)
        if isinstance(kernel, WithAwqScale):
            x, kernel = (x / kernel.awq_scale.reshape(x.shape[-inputs:])).astype(x.dtype), kernel.array
        value, rows = _qarray(kernel), x.shape[:-inputs]
        per_scale = prod(value.shape[:inputs]) // prod(value.scale.shape[:inputs])
        if per_scale < prod(value.shape[:inputs]) and prod(rows) > per_scale:
            # Separate results for each block of inputs would be larger than the kernel.
            dims = (tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))), ((), ())
            return jax.lax.dot_general(x, dequantize(value, x.dtype), dims)
        values = numerics.convert_from(value.qvalue, value.qtype).astype(x.dtype)
        zero = None if value.zero_point is None else value.zero_point.astype(x.dtype)

        def merged(part: Any) -> Any:  # Qwix does not support blocks over several axes
            return None if part is None else part.reshape(-1, *part.shape[inputs:])

        # Qwix's public function would dequantize first.
        out = dot_general._fast_dot_general(
            x.reshape(*rows, -1),
            qarray.QArray(merged(values), merged(value.scale), merged(zero)),
            (((len(rows),), (0,)), ((), ())),
            preferred_element_type=jnp.dtype(jnp.float32),
        )
        return out.astype(x.dtype)


@dataclass(frozen=True)
class _Grouped:
    """A `GroupedProduct`.

    If the kernel is a `QArray` without zero points in which all inputs of an output share a scale, the results are
    scaled. Otherwise, the kernel is dequantized first.
    """

    storage: Storage
    kernel: Kernel

    def store(self, kernel: jax.Array) -> Any:
        return self.storage.store(self.kernel, kernel)

    def __call__(self, x: jax.Array, kernel: Any, sizes: jax.Array | None, context: Context | None = None) -> jax.Array:
        _check(self.kernel, kernel)
        after = isinstance(kernel, qarray.QArray) and kernel.scale.shape[1] == 1 and kernel.zero_point is None
        if not after:
            return grouped_product(x, dequantize(kernel, x.dtype), sizes, context)
        out = grouped_product(x, kernel.qvalue, sizes, context)
        outputs = kernel.qvalue.shape[2]
        scale = jnp.repeat(kernel.scale, outputs // kernel.scale.shape[2], axis=2)  # [groups, 1, out]
        if sizes is not None:
            scale = jnp.repeat(scale[:, 0], sizes, axis=0, total_repeat_length=len(x))
        return (out.astype(jnp.float32) * scale).astype(x.dtype)


def _check(kernel: Kernel, found: Any) -> None:
    if not is_stored(found):
        raise UserError(
            f"checkpoint_is_quantized=true: {kernel.name} is float, and the product needs the values and scales that "
            "trainer.quantize writes"
        )

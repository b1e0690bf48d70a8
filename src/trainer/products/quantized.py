"""Products of quantized operands, in the forward and in the backward pass. Qwix quantizes and multiplies.

The products define a custom backward pass (docs/decisions/0025).
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from qwix._src.core import qarray, stochastic_rounding

from trainer import sharding
from trainer.config.capabilities.remat_tensors import QUANTIZED
from trainer.config.errors import UserError
from trainer.ops.grouped import OF_OUTPUTS, OF_ROWS, OVER_ROWS
from trainer.products.context import Context
from trainer.products.plain import EarlyReduction, GroupedProduct, Kernel, Product

LEAST_PER_SCALE = 128  # with fewer values per scale, Qwix multiplies floating-point numbers
MOST_INT8 = (2**31 - 1) // 128**2  # the sum of this many products of int8 always fits into int32
_ROWS = sharding.Axes(("activation_batch", "activation_length"))
DEVICES = -1  # for `Recipe.parts`: one part for each shard of the rows; for exceptions, see `_parts`


@dataclass(frozen=True)
class Calibration:
    """Qwix's calibration methods for each operand, such as "absmax", "absmax,0.9", "rms,3" or "fixed,-1,1".

    Attributes:
      activation, weight: for the forward pass.
      gradient: for the output's gradient in the product that computes the gradient of activations.
      weight_gradient: for the output's gradient in the product that computes the gradient of the weight.
    """

    activation: str = "absmax"
    weight: str = "absmax"
    gradient: str = "absmax"
    weight_gradient: str = "absmax"


@dataclass(frozen=True)
class Recipe:
    """How a product is quantized.

    Attributes:
      forward: dtype of activations and weights, such as "int8" or "float8_e4m3fn".
      backward: dtype of the output's gradient.
      per_channel: whether each row of activations and each output of the weight has its own scale. Otherwise, each
        operand has a single scale.
      rounding: "": to nearest; "uniform" or "low_bit_uniform": gradients are rounded stochastically, with Qwix's noise
        of that name. Stochastic rounding is only for integers.
      parts: the number of parts into which the batch's rows are split, or DEVICES. For the weight gradient, the
        output's gradient has separate scales in each part.
    """

    forward: str
    backward: str
    calibration: Calibration = Calibration()
    per_channel: bool = True
    rounding: str = ""
    parts: int = 1


def quantized(recipe: Recipe, kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    """Returns the product that `recipe` describes for `kernel`. `partial(quantized, recipe)` is a `MakeProduct`."""
    del rngs
    return _Grouped(recipe, kernel) if kernel.groups else _Dense(recipe, kernel)


@dataclass(frozen=True)
class _Dense:
    """A `Product`."""

    recipe: Recipe
    kernel: Kernel

    def __call__(
        self,
        x: jax.Array,
        inputs: int,
        kernel: jax.Array,
        reduce_early: EarlyReduction | None = None,
        context: Context | None = None,
    ) -> jax.Array:
        kernel = kernel.astype(x.dtype)
        if reduce_early is not None:
            x, kernel = reduce_early(x, kernel)
        rows = x.ndim - inputs
        how = _How(self.recipe, rows, inputs, parts=_parts(self.recipe, prod(x.shape[:rows])), on_tpu=sharding.on_tpu())
        return _multiply(how, x, kernel, None, _noise_keys(self.recipe, self.kernel, context))


@dataclass(frozen=True)
class _Grouped:
    """A `GroupedProduct`. In the weight gradient, rows share scales only within one product on one device.
    The noise of stochastic rounding depends on the index of a row in its product."""

    recipe: Recipe
    kernel: Kernel

    def __call__(
        self, x: jax.Array, kernel: jax.Array, sizes: jax.Array | None, context: Context | None = None
    ) -> jax.Array:
        keys = _noise_keys(self.recipe, self.kernel, context)
        how = _How(
            self.recipe,
            rows=1,
            grouped=True,
            # If the axis whose entries share a scale is sharded, the shards on all devices share that scale.
            shared_inputs=_devices_that_share(self.kernel.names[1]),
            shared_outputs=_devices_that_share(self.kernel.names[2]),
            on_tpu=sharding.on_tpu(),
        )
        return _multiply(how, x, kernel.astype(x.dtype), sizes, None if keys is None else keys[:1])


def _devices_that_share(name: str | None) -> tuple[str, ...]:
    """Returns the mesh axes over which the experts' axis `name` is sharded inside `shard_mapped`."""
    return sharding.mesh_axes("activation_mlp") if name == "mlp" else ()


def _parts(recipe: Recipe, tokens: int) -> int:
    if recipe.parts != DEVICES:
        return recipe.parts
    devices = sharding.shards(_ROWS)
    parts = devices if tokens % devices == 0 and tokens // devices >= LEAST_PER_SCALE else 1
    while tokens // parts > MOST_INT8 and tokens % (2 * parts) == 0:
        parts *= 2
    return parts


def _noise_keys(recipe: Recipe, kernel: Kernel, context: Context | None) -> jax.Array | None:
    """Returns a key for each row of the batch; None: gradients are rounded to nearest."""
    if not recipe.rounding or context is None or context.key is None:
        return None
    own = jax.random.fold_in(context.key, zlib.crc32(f"rounding/{kernel.name}".encode()))
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(own, context.rows)


@dataclass(frozen=True)
class _How:
    """Static parameters of a product, also for its backward pass, which is traced later.

    Shapes: x [*rows, *in], kernel [*in, *out]; with groups, kernel [g, in, out], and x [g, rows, in] or, sorted by
    group, [rows, in].

    Attributes:
      rows: the number of row axes, without the axis of groups.
      inputs: the number of axes of `in`.
      grouped: whether the kernel has groups.
      shared_inputs, shared_outputs: the mesh axes over which `in` and `out` are sharded.
      parts: see `Recipe`; never DEVICES.
      on_tpu: whether the product runs on a TPU.
    """

    recipe: Recipe
    rows: int
    inputs: int = 1
    grouped: bool = False
    shared_inputs: tuple[str, ...] = ()
    shared_outputs: tuple[str, ...] = ()
    parts: int = 1
    on_tpu: bool = False

    def quantize(
        self,
        x: jax.Array,
        dtype: str,
        method: str,
        over: Sequence[int],
        shared: tuple[str, ...] = (),
        noise: jax.Array | None = None,
        tiles: dict[int, int] | None = None,
    ) -> tuple[qarray.QArray, Any]:
        """Returns the quantized `x`, in which entries along the axes `over` share a scale, and the calibration of `x`.

        Args:
          shared: the mesh axes over which `over` is sharded.
          noise: added before rounding; broadcast along the last axes of `x`.
          tiles: maps an axis to the number of consecutive entries that share a scale.
        """
        channels = [axis for axis in range(x.ndim) if axis not in over]
        of_groups = [0] if self.grouped and x.ndim == 3 else []
        how = qarray.HowToQuantize(
            qtype=jnp.dtype(dtype),
            channelwise_axes=channels if self.recipe.per_channel else of_groups,
            tiled_axes=tiles or {},
            calibration_method=method,
        )
        found = qarray.calibrate(x, how)
        if shared:
            found = _of_all(found, method, shared)
        scale, zero_point = qarray.compute_scale_zero_point(found, how.qtype)
        add = None if noise is None else lambda shape: noise.reshape(*noise.shape, *[1] * (len(shape) - noise.ndim))
        return qarray.quantize_with_scale_zero_point(x, how.qtype, scale, zero_point, add), found

    def multiply(self, left: Any, right: Any, dimensions: Any, sizes: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
        """Returns the product in `dtype`. `dimensions`: as in `jax.lax.dot_general`, or, with `sizes`, as in
        `ragged_dot_general`."""
        left, right = self._supported(left), self._supported(right)
        self._check_sum(left, right, dimensions if sizes is None else dimensions.dot_dimension_numbers)
        if sizes is None:
            return qwix.dot_general(left, right, dimensions, preferred_element_type=dtype)

        @jax.custom_batching.sequential_vmap
        def product(left: Any, right: Any, sizes: jax.Array) -> jax.Array:  # see `ops.grouped.grouped_matmul`
            return qwix.ragged_dot_general(left, right, sizes, dimensions, preferred_element_type=dtype)

        return product(left, right, sizes)

    def _check_sum(self, left: Any, right: Any, dimensions: Any) -> None:
        """Checks that sums of integer products fit into int32.

        Raises:
          UserError: int32 may overflow; the message names the limit.
        """
        limit = {"int8": MOST_INT8, "int4": MOST_INT8 * 256}.get(self.recipe.forward)
        terms = prod(left.shape[axis] for axis in dimensions[0][0])
        for operand, axes in zip((left, right), dimensions[0], strict=True):
            if isinstance(operand, qarray.QArray):  # the sums of tiles are added as floating-point numbers
                terms = min(terms, prod(operand.shape[axis] // operand.scale.shape[axis] for axis in axes))
        if limit is not None and terms > limit:
            raise UserError(
                f"quantization={self.recipe.forward}: a sum of {terms:,} products of integers may overflow int32; "
                f"the limit is {limit:,}; use fp8, more parts of the tokens (quantization_local_shard_count), "
                "or leave the matrix float (unquantized_modules)"
            )

    def _supported(self, x: Any) -> Any:
        """Casts int4 to int8, except on a TPU, because XLA's other compilers fail on many int4 products. The result is
        the same."""
        if self.on_tpu:
            return x
        return jax.tree.map(lambda part: part.astype(jnp.int8) if part.dtype == jnp.int4 else part, x)


def _of_all(found: Any, method: str, axes: tuple[str, ...]) -> Any:
    """Returns the calibration over the shards of all devices along the mesh axes `axes`."""
    if method.startswith("rms"):
        return jax.tree.map(lambda rms: jnp.sqrt(jax.lax.pmean(rms**2, axes)), found)
    return jax.lax.pmax(found, axes)


class _Kept(NamedTuple):
    """The residuals of an operand: its quantized value and, if its method clips, the original and its calibration."""

    value: qarray.QArray
    clipped: tuple[jax.Array, Any] | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(
    how: _How, x: jax.Array, kernel: jax.Array, sizes: jax.Array | None, noise_keys: jax.Array | None
) -> jax.Array:
    """Returns the product of the quantized operands in the dtype of `x`. The backward pass quantizes the gradient of
    the result twice: for the product with the quantized kernel, and for the product with the quantized `x`. Rounding
    has the gradient of the identity; clipping has gradient 0 outside of the range."""
    return _forward(how, x, kernel, sizes, noise_keys)[0]


def _forward(how: _How, x: jax.Array, kernel: jax.Array, sizes: Any, noise_keys: Any) -> tuple[jax.Array, Any]:
    recipe, first = how.recipe, int(how.grouped)
    in_x, in_kernel = range(x.ndim - how.inputs, x.ndim), range(first, first + how.inputs)
    methods = recipe.calibration
    of_kernel = how.shared_inputs if recipe.per_channel else how.shared_inputs + how.shared_outputs
    kept_x = _keep(how, x, methods.activation, in_x, how.shared_inputs)
    kept_kernel = _keep(how, kernel, methods.weight, in_kernel, of_kernel)
    dims = OF_ROWS if sizes is not None else ((tuple(in_x), tuple(in_kernel)), _batch(how, sizes))
    out = how.multiply(kept_x.value, kept_kernel.value, dims, sizes, x.dtype)
    return out, (kept_x, kept_kernel, sizes, noise_keys)


def _keep(how: _How, x: jax.Array, method: str, over: Sequence[int], shared: tuple[str, ...]) -> _Kept:
    value, found = how.quantize(x, how.recipe.forward, method, over, shared)
    value = jax.tree.map(_named, value)
    return _Kept(value, (x, found) if clips(method) else None)


def _named(part: jax.Array) -> jax.Array:
    """Returns `part` under a checkpoint name. 8-bit floats are bitcast to integers while `jax.checkpoint` keeps them,
    because JAX rounds floats that it keeps, and this rounding turns float8_e4m3fn numbers above 240 into NaN."""
    if part.dtype.itemsize > 1 or not jnp.issubdtype(part.dtype, jnp.floating):
        return checkpoint_name(part, QUANTIZED)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(part, jnp.uint8), QUANTIZED)
    return jax.lax.bitcast_convert_type(bits, part.dtype)


def clips(method: str) -> bool:
    """Returns whether values may be outside of the range that a calibration method computes."""
    name, *factor = method.split(",")
    return name != "absmax" or bool(factor and float(factor[0]) < 1)


def _batch(how: _How, sizes: jax.Array | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((0,), (0,)) if how.grouped and sizes is None else ((), ())


def _backward(how: _How, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
    kept_x, kept_kernel, sizes, noise_keys = kept
    x_grad = _x_gradient(how, kept_kernel.value, gradient, sizes, noise_keys)
    kernel_grad = _kernel_gradient(how, kept_x.value, gradient, sizes, noise_keys)
    methods = how.recipe.calibration
    return (
        _inside(x_grad, kept_x.clipped, methods.activation),
        _inside(kernel_grad, kept_kernel.clipped, methods.weight),
        None,
        None,
    )


_multiply.defvjp(_forward, _backward)


def _inside(gradient: jax.Array, clipped: tuple[jax.Array, Any] | None, method: str) -> jax.Array:
    return gradient if clipped is None else qarray.clip_gradient_to_calibration(gradient, *clipped, method)


def _x_gradient(how: _How, kernel: qarray.QArray, gradient: jax.Array, sizes: Any, noise_keys: Any) -> jax.Array:
    """Returns the gradient of `x`, a sum over outputs: `gradient` is first multiplied by the kernel's output scales."""
    first, ndim = int(how.grouped), gradient.ndim
    outputs = kernel.ndim - first - how.inputs
    out, out_kernel = range(ndim - outputs, ndim), range(first + how.inputs, kernel.ndim)
    scaled = gradient * _scale_of_outputs(how, kernel.scale, gradient, sizes)
    noise = _noise(how, noise_keys, 0, gradient.shape)
    methods = how.recipe.calibration
    value, _ = how.quantize(scaled, how.recipe.backward, methods.gradient, out, how.shared_outputs, noise)
    dims = OF_OUTPUTS if sizes is not None else ((tuple(out), tuple(out_kernel)), _batch(how, sizes))
    return how.multiply(value, kernel.qvalue, dims, sizes, gradient.dtype)


def _scale_of_outputs(how: _How, scale: jax.Array, gradient: jax.Array, sizes: jax.Array | None) -> jax.Array:
    if not how.grouped:
        return scale.reshape((1,) * how.rows + scale.shape[how.inputs :])
    if sizes is None:
        return scale  # [g, 1, out]
    if len(scale) == 1:  # a method with a fixed range has a single scale
        return scale[0]
    return jnp.repeat(scale[:, 0], sizes, axis=0, total_repeat_length=len(gradient))


def _kernel_gradient(how: _How, x: qarray.QArray, gradient: jax.Array, sizes: Any, noise_keys: Any) -> jax.Array:
    """Returns the gradient of the kernel, a sum over rows: `gradient` is first multiplied by the row scales of `x`."""
    first = int(how.grouped and sizes is None)
    rows = range(first, first + how.rows)
    scale = x.scale.reshape(x.scale.shape[: first + how.rows] + (1,) * (gradient.ndim - first - how.rows))
    value, scaled, noise = x.qvalue, gradient * scale, _noise(how, noise_keys, 1, gradient.shape)
    tiles = {}
    if how.parts > 1:  # merges the row axes
        value, scaled = (a.reshape(-1, *a.shape[how.rows :]) for a in (value, scaled))
        rows, tiles = range(1), {0: _per_part(len(scaled), how.parts)}
        noise = None if noise is None else noise.reshape(-1)
    method, shared = how.recipe.calibration.weight_gradient, () if how.recipe.per_channel else how.shared_outputs
    scaled, _ = how.quantize(scaled, how.recipe.backward, method, rows, shared, noise, tiles)
    dims = OVER_ROWS if sizes is not None else ((tuple(rows), tuple(rows)), _batch(how, sizes))
    return how.multiply(value, scaled, dims, sizes, gradient.dtype)


def _per_part(tokens: int, parts: int) -> int:
    """Returns the number of tokens in a part.

    Raises:
      UserError: the parts would be unequal or too small.
    """
    if tokens % parts or tokens // parts < LEAST_PER_SCALE:
        raise UserError(
            f"quantization_local_shard_count={parts}: a microbatch has {tokens} tokens; it must have a multiple of "
            f"{parts} tokens, and at least {LEAST_PER_SCALE} in each part"
        )
    return tokens // parts


def _noise(how: _How, keys: jax.Array | None, number: int, shape: Sequence[int]) -> jax.Array | None:
    """Returns noise for each row of a gradient of `shape`; None without keys."""
    if keys is None:
        return None
    draw = getattr(stochastic_rounding, f"{how.recipe.rounding}_noise")
    one = lambda key, shape: draw(jax.random.fold_in(key, number), tuple(shape))  # noqa: E731
    if how.grouped:
        return one(keys[0], shape[:-1])
    return jax.vmap(lambda key: one(key, shape[1 : how.rows]))(keys)

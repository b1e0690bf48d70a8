"""The product of activations with a parameter matrix."""

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainer import sharding
from trainer.config.capabilities.invariant_keys import COLUMNS
from trainer.ops.grouped import grouped_matmul
from trainer.ops.paths import whole_name
from trainer.products.context import Context

# (x, kernel) -> (x, kernel), such as `sharding.reduce_gradient_early`; see `reduce_early` in `Product`
EarlyReduction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Product(Protocol):
    """Multiplies `x` with a kernel: [..., *in] and [*in, *out] -> [..., *out], in the dtype of `x`.

    Optional method `store(kernel)`, which a `GroupedProduct` may have, too: returns the form in which the initial
    kernel is stored, which is an array or a pytree. In a pytree, each array has the kernel's axes, except that some may
    be missing or have length 1 (`sharding.axes_of_parts`).

    Optional method `array(kernel, dtype)`: returns an array [*in, *out]. Up to rounding, this product equals the plain
    product with that array.
    """

    def __call__(
        self, x: jax.Array, inputs: int, kernel: Any, reduce_early: EarlyReduction | None, context: Context | None
    ) -> jax.Array:
        """Returns the product.

        Args:
          inputs: the number of axes of `in`.
          kernel: the parameter as stored, in the stored dtype. It is a pytree if `store` returns one.
          reduce_early: None, or a function to apply to the two operands just before they are multiplied, in their
            dtype. It affects only the gradient of the kernel; a product whose kernel has no gradient ignores it.
          context: the layer's context; its rows are the first axis of `x`. None in the output head. Before using
            `context.key`, fold a number into it, because the layer's dropout uses the same key.
        """


def stored(product: Any, kernel: jax.Array) -> Any:
    """Returns the form in which a layer stores the initial `kernel` of a product."""
    return product.store(kernel) if hasattr(product, "store") else kernel


def in_dtype(kernel: Any, dtype: jnp.dtype) -> Any:
    """Casts a kernel that is an array to `dtype`, before its all-gather. Other kernels are all-gathered as stored."""
    return kernel.astype(dtype) if isinstance(kernel, jax.Array | np.ndarray) else kernel


class Kernel(NamedTuple):
    """A matrix of a layer, for which a product is made."""

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    names: tuple[str | None, ...]  # the logical name of each axis of the kernel
    groups: int = 0  # 0: the kernel is [*in_shape, *out_shape]; else it is [groups, *in_shape, *out_shape]
    name: str = ""  # canonical, such as decoder/layers/mlp/wo/kernel; "" for a layer outside of a model


class MakeProduct(Protocol):
    """Makes the product of one kernel."""

    def __call__(self, kernel: Kernel, *, rngs: nnx.Rngs) -> "Product | GroupedProduct":
        """Returns a `Product`, or a `GroupedProduct` for a kernel with groups.

        The product may be an `nnx.Module`. Its parameters are then stored in the model, as "product" next to the
        kernel. While a grouped product is computed, its parameters are sharded by their logical axes: "exp" and "mlp"
        like those of the kernel, all other axes not at all.
        """


# Pairs of a regular expression and the maker of products for kernels with a matching canonical name, such as
# decoder/layers/mlp/wo/kernel. The first match counts. Other kernels use the plain product.
Rules = Sequence[tuple[str, MakeProduct]]


def maker(rules: Rules, name: str) -> MakeProduct | None:
    """Returns the maker of the product of the kernel `name`; None for the plain product."""
    return next((make for pattern, make in rules if re.search(pattern, whole_name(name))), None)


def product(
    x: jax.Array,
    inputs: int,
    kernel: jax.Array,
    reduce_early: EarlyReduction | None = None,
    context: Context | None = None,
    *,
    transposed: bool = False,
    columns: int = 0,
) -> jax.Array:
    """See `Product`. The kernel is cast to the dtype of `x`.

    In general, axes are merged to multiply two matrices, so that XLA's CPU backend does not copy and transpose the
    operands for the weight gradient. Axes are not merged on a TPU, where merging would need a copy into a common
    layout, nor if the tokens of a row are split over devices, where it would need tokens of other devices
    (docs/decisions/0004).

    `transposed`: whether `kernel` is a matrix [out, in]; on a CPU, transposing the kernel before the call would copy
    it. `columns`: if axes are merged, a kernel that is not `transposed` is padded to at least this many columns.
    """
    del context
    kernel = kernel.astype(x.dtype)
    if reduce_early is not None:
        x, kernel = reduce_early(x, kernel)
    sums = sharding.sum_dtype(x)
    if sharding.on_tpu() or sharding.splits_rows():
        whole = kernel.T if transposed else kernel
        return jnp.tensordot(x, whole, inputs, preferred_element_type=sums).astype(x.dtype)
    leading, out_shape = x.shape[: x.ndim - inputs], kernel.shape[:1] if transposed else kernel.shape[inputs:]
    rows = x.reshape(prod(leading), -1)
    if sums is not None and len(rows) == 1:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))  # XLA's CPU backend has no fast code for one row
    matrix = kernel if transposed else _widened(kernel.reshape(-1, prod(out_shape)), columns)
    contracted = ((1,), (1 if transposed else 0,))
    out = jax.lax.dot_general(rows, matrix, (contracted, ((), ())), preferred_element_type=sums)
    return out[: prod(leading), : prod(out_shape)].astype(x.dtype).reshape(*leading, *out_shape)


class GroupedProduct(Protocol):
    """Multiplies each group of rows with a separate matrix, such as an expert's."""

    def __call__(self, x: jax.Array, kernel: Any, sizes: jax.Array | None, context: Context | None) -> jax.Array:
        """Returns the product in the dtype of `x`.

        With `sizes`, int32 [groups], `x` is [rows, in], sorted by group, and the result is [rows, out]. If `sizes`
        is None, `x` is [groups, rows, in] and the result is [groups, rows, out].

        Args:
          kernel: [groups, in, out], in any dtype, or its stored pytree. If several devices share a product, this is one
            device's shard: some of the groups, and some of the inputs or of the outputs.
          context: the context of the layer, with the device's rows of the batch. These are not the rows of `x`,
            which are sorted by group and may come from other devices.
        """


def grouped_product(
    x: jax.Array, kernel: jax.Array, sizes: jax.Array | None, context: Context | None = None
) -> jax.Array:
    """See `GroupedProduct`."""
    del context
    kernel = kernel.astype(x.dtype)
    if sizes is not None:
        return grouped_matmul(x, kernel, sizes)
    return jnp.einsum("gmk,gkn->gmn", x, kernel, preferred_element_type=sharding.sum_dtype(x)).astype(x.dtype)


def make_plain(kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    """A `MakeProduct`: returns the plain product of `kernel`."""
    del rngs
    return grouped_product if kernel.groups else product


def wide_product(
    x: jax.Array,
    inputs: int,
    kernel: jax.Array,
    reduce_early: EarlyReduction | None = None,
    context: Context | None = None,
) -> jax.Array:
    """See `make_wide`."""
    return product(x, inputs, kernel, reduce_early, context, columns=COLUMNS)


def wide_grouped_product(
    x: jax.Array, kernel: jax.Array, sizes: jax.Array | None, context: Context | None = None
) -> jax.Array:
    """See `make_wide`."""
    return grouped_product(x, _widened(kernel, COLUMNS), sizes, context)[..., : kernel.shape[-1]]


def make_wide(kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    """A `MakeProduct`: returns the plain product of `kernel`, padded with zeros to at least COLUMNS columns.

    Without padding, XLA's CPU backend multiplies a narrow float32 matrix with a different algorithm if `x` has more
    than 80 rows, so the result for a row would depend on the number of rows.
    """
    if prod(kernel.out_shape) >= COLUMNS:
        return make_plain(kernel, rngs=rngs)
    return wide_grouped_product if kernel.groups else wide_product


def _widened(kernel: jax.Array, columns: int) -> jax.Array:
    """Returns `kernel` [..., out] padded with zero columns, up to `columns`."""
    missing = max(0, columns - kernel.shape[-1])
    return jnp.pad(kernel, [(0, 0)] * (kernel.ndim - 1) + [(0, missing)]) if missing else kernel

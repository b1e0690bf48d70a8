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

# (x, kernel) -> (x, kernel): `sharding.reduce_gradient_early` for the matrix of the output head
EarlyReduction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Product(Protocol):
    """Multiplies `x` with a kernel: [..., *in] and [*in, *out] -> [..., *out], in the dtype of `x`.

    It may have a method `store(kernel)`, which returns what the layer stores in place of the initial kernel: an array
    or a pytree whose parts have the kernel's shape, lack some of its axes, or have length 1 in them
    (`sharding.axes_of_parts`). A grouped product may have it, too. With a method `array(kernel, dtype)`, it is the
    product with that array [*in, *out], up to rounding.
    """

    def __call__(
        self, x: jax.Array, inputs: int, kernel: Any, reduce_early: EarlyReduction | None, context: Context | None
    ) -> jax.Array:
        """See above.

        Args:
          inputs: the number of axes of `in`.
          kernel: the parameter as stored, in its own dtype. It may be a pytree, see above.
          reduce_early: None, or a function to apply to the two operands just before they are multiplied, in their
            dtype. It affects only the gradient of the kernel; a product whose kernel has no gradient ignores it.
          context: the context of the layer, whose rows are the first axis of `x`; None in the output head. Its key is
            also that of the layer's dropout: fold it with a number of your own.
        """


def stored(product: Any, kernel: jax.Array) -> Any:
    """Returns what a layer stores for the initial `kernel` of a product."""
    return product.store(kernel) if hasattr(product, "store") else kernel


def in_dtype(kernel: Any, dtype: jnp.dtype) -> Any:
    """Returns a kernel that is an array in `dtype`, before devices gather it. Other kernels are gathered as stored."""
    return kernel.astype(dtype) if isinstance(kernel, jax.Array | np.ndarray) else kernel


class Kernel(NamedTuple):
    """A matrix of a layer, for which a product is made."""

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    names: tuple[str | None, ...]  # the logical name of each axis of the kernel
    groups: int = 0  # 0: the kernel is [*in_shape, *out_shape]; else there are several: [groups, *in_shape, *out_shape]
    name: str = ""  # canonical, such as decoder/layers/mlp/wo/kernel; "" for a layer outside of a model


class MakeProduct(Protocol):
    """Makes the product of one kernel."""

    def __call__(self, kernel: Kernel, *, rngs: nnx.Rngs) -> "Product | GroupedProduct":
        """Returns a `Product`, or a `GroupedProduct` for a kernel with groups.

        It may be an `nnx.Module`. Its parameters then belong to the model, under the name "product" next to the kernel.
        For a grouped product, their logical names determine which part of them a device gets: "exp" and "mlp" are
        sharded as in the kernel.
        """


# Pairs of a regular expression and what makes the products of the kernels whose canonical name it matches, such as
# decoder/layers/mlp/wo/kernel. The first match counts. Other kernels have the plain product.
Rules = Sequence[tuple[str, MakeProduct]]


def maker(rules: Rules, name: str) -> MakeProduct | None:
    """Returns what makes the product of the kernel `name`; None for the plain product."""
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

    Except on a TPU, this is one product of two matrices, so that XLA's CPU backend does not transpose a copy of the
    operands for the weight gradient. On a TPU, merged axes would need a copy into a common order, and where devices
    share rows, they would need other tokens (docs/decisions/0004).

    `transposed`: `kernel` is a matrix [out, in], of which a CPU would make a transposed copy. `columns`: except on a
    TPU, other kernels are multiplied as matrices with at least so many columns.
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
    """Multiplies each group of rows with its own matrix, such as an expert's."""

    def __call__(self, x: jax.Array, kernel: Any, sizes: jax.Array | None, context: Context | None) -> jax.Array:
        """Returns the product in the dtype of `x`.

        With `sizes`, int32 [groups], `x` is [rows, in], sorted by group, and the result is [rows, out]. With None, `x`
        is [groups, rows, in] and the result is [groups, rows, out].

        Args:
          kernel: [groups, in, out], in any dtype, or the pytree that is stored for it. If several devices share a
            product, it is one device's part: its own groups, with only the inputs or the outputs with which this device
            computes.
          context: the context of the layer, with the device's rows of the batch. They are not the rows of `x`, which
            are sorted by group and may come from other devices.
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
    """A `MakeProduct`: returns the plain product of `kernel`, with columns of zeros if it has less than COLUMNS.

    XLA's CPU backend multiplies a narrow matrix of float32 with up to 80 rows in another way than with more.
    """
    if prod(kernel.out_shape) >= COLUMNS:
        return make_plain(kernel, rngs=rngs)
    return wide_grouped_product if kernel.groups else wide_product


def _widened(kernel: jax.Array, columns: int) -> jax.Array:
    """Returns `kernel` [..., out] with zeros behind its columns, up to `columns`."""
    missing = max(0, columns - kernel.shape[-1])
    return jnp.pad(kernel, [(0, 0)] * (kernel.ndim - 1) + [(0, missing)]) if missing else kernel

"""The product of activations with a parameter matrix."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainer import sharding
from trainer.ops.grouped import grouped_matmul

# (x, kernel) -> (x, kernel): `sharding.reduce_gradient_early` for the matrix of the output head
EarlyReduction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Product(Protocol):
    """Multiplies `x` with a kernel: [..., *in] and [*in, *out] -> [..., *out], in the dtype of `x`.

    It may have a method `store(kernel)`, which returns what the layer stores in place of the initial kernel: an array
    or a pytree whose parts have the kernel's shape, lack some of its axes, or have length 1 in them
    (`sharding.axes_of_parts`). A grouped product may have it, too.
    """

    def __call__(self, x: jax.Array, inputs: int, kernel: Any, reduce_early: EarlyReduction | None) -> jax.Array:
        """See above.

        Args:
          inputs: the number of axes of `in`.
          kernel: the parameter as stored, in its own dtype. It may be a pytree, see above.
          reduce_early: None, or a function to apply to the two operands just before they are multiplied, in their
            dtype. It affects only the gradient of the kernel; a product whose kernel has no gradient ignores it.
        """


def stored(product: Any, kernel: jax.Array) -> Any:
    """Returns what a layer stores for the initial `kernel` of a product."""
    return product.store(kernel) if hasattr(product, "store") else kernel


def in_dtype(kernel: Any, dtype: jnp.dtype) -> Any:
    """Returns a kernel that is an array in `dtype`, before devices gather it. Other kernels are gathered as stored."""
    return kernel.astype(dtype) if isinstance(kernel, jax.Array | np.ndarray) else kernel


class MakeProduct(Protocol):
    """Makes the product of one kernel."""

    def __call__(
        self, in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str | None], *, rngs: nnx.Rngs
    ) -> Product:
        """Returns the product of one kernel. `names`: the logical name of each axis of the kernel
        [*in_shape, *out_shape].

        The product may be an `nnx.Module`. Its parameters then belong to the model, under the name "product" next to
        the kernel.
        """


def plain(in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str | None], *, rngs: nnx.Rngs) -> Product:
    """Returns `product`, for every kernel."""
    del in_shape, out_shape, names, rngs
    return product


def product(x: jax.Array, inputs: int, kernel: jax.Array, reduce_early: EarlyReduction | None = None) -> jax.Array:
    """See `Product`. The kernel is cast to the dtype of `x`.

    Except on a TPU, this is one product of two matrices, so that XLA's CPU backend does not transpose a copy of the
    operands for the weight gradient. On a TPU, merged axes would need a copy into a common order (docs/decisions/0004).
    """
    kernel = kernel.astype(x.dtype)
    if reduce_early is not None:
        x, kernel = reduce_early(x, kernel)
    if sharding.on_tpu():
        return jnp.tensordot(x, kernel, inputs)
    leading, out_shape = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    out = x.reshape(prod(leading), -1) @ kernel.reshape(-1, prod(out_shape))
    return out.reshape(*leading, *out_shape)


class GroupedProduct(Protocol):
    """Multiplies each group of rows with its own matrix, such as an expert's."""

    def __call__(self, x: jax.Array, kernel: jax.Array, sizes: jax.Array | None) -> jax.Array:
        """Returns the product in the dtype of `x`.

        With `sizes`, int32 [groups], `x` is [rows, in], sorted by group, and the result is [rows, out]. With None, `x`
        is [groups, rows, in] and the result is [groups, rows, out].

        Args:
          kernel: [groups, in, out], in any dtype, or the pytree that is stored for it. If several devices share a
            product, it is one device's part: its own groups, with only the inputs or the outputs with which this device
            computes.
        """


class MakeGrouped(Protocol):
    """Makes the product of one kernel [groups, in_size, out_size], whose axes have the logical `names`."""

    def __call__(self, groups: int, in_size: int, out_size: int, names: Sequence[str | None]) -> GroupedProduct: ...


def plain_grouped(groups: int, in_size: int, out_size: int, names: Sequence[str | None]) -> GroupedProduct:
    """Returns `grouped_product`, for every kernel."""
    del groups, in_size, out_size, names
    return grouped_product


def grouped_product(x: jax.Array, kernel: jax.Array, sizes: jax.Array | None) -> jax.Array:
    """See `GroupedProduct`."""
    kernel = kernel.astype(x.dtype)
    return jnp.einsum("gmk,gkn->gmn", x, kernel) if sizes is None else grouped_matmul(x, kernel, sizes)

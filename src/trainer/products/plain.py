"""The product of activations with a parameter matrix."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.ops.grouped import grouped_matmul

# (x, kernel) -> (x, kernel): `sharding.settle_gradient` for the matrix of the head
Settle = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Product(Protocol):
    """Multiplies `x` with a kernel: [..., *in] and [*in, *out] -> [..., *out], in the dtype of `x`."""

    def __call__(self, x: jax.Array, inputs: int, kernel: Any, settle: Settle | None) -> jax.Array:
        """See above.

        Args:
          inputs: the number of axes of `in`.
          kernel: the parameter as it is stored, in its dtype; it may be a pytree, such as integers with their scales.
          settle: None, or a function through which the two operands pass just before they are multiplied, in their
            dtype. It concerns the gradient of the kernel; a product without one ignores it.
        """


class MakeProduct(Protocol):
    """Makes the product of one kernel."""

    def __call__(
        self, in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str | None], *, rngs: nnx.Rngs
    ) -> Product:
        """`names`: the logical name of each axis of the kernel [*in_shape, *out_shape]. The product may be an
        `nnx.Module`: its parameters then belong to the model, under the name "product" next to the kernel."""


def plain(in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str | None], *, rngs: nnx.Rngs) -> Product:
    """`product`, for every kernel."""
    del in_shape, out_shape, names, rngs
    return product


def product(x: jax.Array, inputs: int, kernel: jax.Array, settle: Settle | None = None) -> jax.Array:
    """See `Product`. The kernel is cast to the dtype of `x`.

    Not on a TPU, this is one product of matrices: XLA's CPU backend then transposes no copy of the operands for the
    weight gradient. On a TPU, merged axes would need a copy into a common order (docs/decisions/0004).
    """
    kernel = kernel.astype(x.dtype)
    if settle is not None:
        x, kernel = settle(x, kernel)
    if sharding.on_tpu():
        return jnp.tensordot(x, kernel, inputs)
    leading, out_shape = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    out = x.reshape(prod(leading), -1) @ kernel.reshape(-1, prod(out_shape))
    return out.reshape(*leading, *out_shape)


class GroupedProduct(Protocol):
    """Multiplies each group of rows by its own matrix, such as an expert's."""

    def __call__(self, x: jax.Array, kernel: jax.Array, sizes: jax.Array | None) -> jax.Array:
        """In the dtype of `x`: [rows, out] of rows [rows, in] in the order of their groups, of which there are `sizes`,
        int32 [groups]; with None, [groups, rows, out] of [groups, rows, in].

        Args:
          kernel: [groups, in, out], in any dtype. Where devices share a product, it is a device's part: all groups and
            inputs, or outputs, with which this device computes.
        """


class MakeGrouped(Protocol):
    """Makes the product of one kernel [groups, in_size, out_size], whose axes have the logical `names`."""

    def __call__(self, groups: int, in_size: int, out_size: int, names: Sequence[str | None]) -> GroupedProduct: ...


def plain_grouped(groups: int, in_size: int, out_size: int, names: Sequence[str | None]) -> GroupedProduct:
    """`grouped_product`, for every kernel."""
    del groups, in_size, out_size, names
    return grouped_product


def grouped_product(x: jax.Array, kernel: jax.Array, sizes: jax.Array | None) -> jax.Array:
    """See `GroupedProduct`."""
    kernel = kernel.astype(x.dtype)
    return jnp.einsum("gmk,gkn->gmn", x, kernel) if sizes is None else grouped_matmul(x, kernel, sizes)

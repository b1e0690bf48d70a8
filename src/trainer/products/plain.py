"""The product of what a model computes with a matrix of its parameters."""

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding


class Product(Protocol):
    """How `x` is multiplied with a kernel: [..., *in] and [*in, *out] -> [..., *out], in the dtype of `x`."""

    def __call__(self, x: jax.Array, inputs: int, kernel: Any) -> jax.Array:
        """`inputs`: how many axes `in` has. `kernel`: the parameter as it is stored."""


class MakeProduct(Protocol):
    """Makes the product of one kernel."""

    def __call__(
        self, in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str | None], *, rngs: nnx.Rngs
    ) -> Product:
        """`names`: the logical name of each axis of the kernel [*in_shape, *out_shape]. The product may be an
        `nnx.Module`: its parameters are then the model's, under the name "product" beside the kernel."""


def plain(in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str | None], *, rngs: nnx.Rngs) -> Product:
    """`product`, whatever the kernel."""
    del in_shape, out_shape, names, rngs
    return product


def product(x: jax.Array, inputs: int, kernel: jax.Array) -> jax.Array:
    """See `Product`. The kernel is cast to the dtype of `x`.

    Off a TPU this is one product of matrices: for the gradient of the kernel XLA's CPU backend then transposes no copy
    of its operands. On a TPU it is not: axes that were merged into one would have to be copied into each other's order
    (docs/decisions/0004).
    """
    kernel = kernel.astype(x.dtype)
    if sharding.on_tpu():
        return jnp.tensordot(x, kernel, inputs)
    leading, out_shape = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    out = x.reshape(prod(leading), -1) @ kernel.reshape(-1, prod(out_shape))
    return out.reshape(*leading, *out_shape)

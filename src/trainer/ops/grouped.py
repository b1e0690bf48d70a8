"""Grouped matrix multiplication: each group of rows is multiplied by its own matrix.

Shapes: m rows, g groups, k inputs, n outputs. The first size_g[0] rows belong to group 0, the next size_g[1] to group
1, and so on; the sizes sum to m.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# The dimension numbers of x @ matrix, gradient @ matrix^T, and x^T @ gradient.
OF_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
OF_OUTPUTS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@jax.custom_vjp
def grouped_matmul(x_mk: jax.Array, matrix_gkn: jax.Array, size_g: jax.Array) -> jax.Array:
    """Multiplies each row by the matrix of its group: [m, n]. Differentiable in reverse mode only.

    The compiler chooses the kernel (`jax.lax.ragged_dot_general`). The backward pass is written by hand: under
    `jax.vmap`, for example over DiLoCo's islands, JAX's derivative fails unless all operands have the mapped axis.
    """
    return _ragged(OF_ROWS)(x_mk, matrix_gkn, size_g)


def _forward(x_mk: jax.Array, matrix_gkn: jax.Array, size_g: jax.Array) -> Any:
    return grouped_matmul(x_mk, matrix_gkn, size_g), (x_mk, matrix_gkn, size_g)


def _backward(kept: Any, gradient_mn: jax.Array) -> Any:
    x_mk, matrix_gkn, size_g = kept
    return (
        _ragged(OF_OUTPUTS)(gradient_mn, matrix_gkn, size_g),
        _ragged(OVER_ROWS)(x_mk, gradient_mn, size_g),
        None,
    )


grouped_matmul.defvjp(_forward, _backward)


def _ragged(dimensions: jax.lax.RaggedDotDimensionNumbers) -> Callable[..., jax.Array]:
    """Returns a function that computes the product. `jax.vmap` runs it for one index of the mapped axis after
    another."""

    @jax.custom_batching.sequential_vmap
    def product(left: jax.Array, right: jax.Array, size_g: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(left, right, size_g, dimensions)

    return product


def grouped_matmul_reference(x_mk: jax.Array, matrix_gkn: jax.Array, size_g: jax.Array) -> jax.Array:
    """Computes `grouped_matmul` with plain products: multiplies each row by all matrices, and selects by group."""
    end_g = jnp.cumsum(size_g)
    row_m = jnp.arange(x_mk.shape[0])
    own_gm = (row_m >= (end_g - size_g)[:, None]) & (row_m < end_g[:, None])
    return jnp.einsum("gm,mk,gkn->mn", own_gm.astype(x_mk.dtype), x_mk, matrix_gkn)

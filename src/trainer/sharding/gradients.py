"""Controls how the gradients of matrices are sharded, and when they are reduced."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from trainer.sharding.context import on_tpu, sharding_of, shards
from trainer.sharding.rules import without_fsdp


def gathered_over_fsdp(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Returns `x` sharded by `names`, but all-gathered over the mesh axes in `config.derived.FSDP`. The gradient of `x`
    is sharded by `names` over all mesh axes, including those in FSDP."""
    at = sharding_of(names, x.shape)
    return x if at is None else _resharded(jax.lax.with_sharding_constraint(x, at), without_fsdp(at), at)


def with_gradient_over(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Returns `x` unchanged. The gradient of `x` is sharded by `names`, regardless of how `x` is sharded."""
    at = sharding_of(names, x.shape)
    return x if at is None else _resharded(x, None, at)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(x: jax.Array, to: NamedSharding | None, back: NamedSharding) -> jax.Array:
    return x if to is None else jax.lax.with_sharding_constraint(x, to)


def _resharded_forward(x: jax.Array, to: NamedSharding | None, back: NamedSharding) -> tuple[jax.Array, None]:
    return _resharded(x, to, back), None


def _resharded_backward(to: NamedSharding | None, back: NamedSharding, _: None, cotangent: jax.Array) -> Any:
    return (jax.lax.with_sharding_constraint(cotangent, back),)


_resharded.defvjp(_resharded_forward, _resharded_backward)


def reduce_gradient_early(
    x: jax.Array,
    matrix: jax.Array,
    names: Sequence[str | None],
    gathered: Sequence[str | None] | None = None,
    rows: Sequence[str | None] = (),
) -> tuple[jax.Array, jax.Array]:
    """Returns `x` and `matrix`, which the caller multiplies. In the backward pass, the gradient of `matrix` is reduced
    over devices before the gradient of `x` is used.

    It is for a matrix at the end of a model: without it, the compiler stores the matrix's unreduced gradient throughout
    the backward pass of all layers. On TPU, if a device has more rows of `x` than the matrix has inputs, the matrix is
    all-gathered before the product. Without this all-gather, libtpu would compute the product in a ring, with two
    copies of the result, which in this case is larger than the matrix.

    Args:
      x: [*rows, *inputs]. Inside `shard_mapped`, where gradients are separate on each device, `x` and `matrix` are
        returned unchanged.
      matrix: [*inputs, *outputs] or [*outputs, *inputs].
      names: the logical names of the axes of `matrix`.
      gathered: the logical names of the axes of the all-gathered matrix, with None for the input axes. If not given,
        the matrix is never all-gathered.
      rows: the logical names of the row axes of `x`.
    """
    at = sharding_of(names, matrix.shape)
    if at is None or jax.sharding.get_abstract_mesh().manual_axes:
        return x, matrix
    if gathered is None or not on_tpu():
        return _reduced(x, matrix, at, at)
    inputs = math.prod(size for size, name in zip(matrix.shape, gathered, strict=True) if name is None)
    if x.size // inputs // shards(rows) <= inputs:
        return _reduced(x, matrix, at, at)
    inside = sharding_of(gathered, matrix.shape)
    assert inside is not None
    return _reduced(x, matrix, at, inside)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _reduced(x: jax.Array, matrix: jax.Array, at: NamedSharding, inside: NamedSharding) -> tuple[jax.Array, jax.Array]:
    return x, matrix if inside == at else jax.lax.with_sharding_constraint(matrix, inside)


def _reduced_forward(x: jax.Array, matrix: jax.Array, at: NamedSharding, inside: NamedSharding) -> Any:
    return _reduced(x, matrix, at, inside), None


def _reduced_backward(
    at: NamedSharding, inside: NamedSharding, _: None, cotangents: tuple[jax.Array, jax.Array]
) -> Any:
    input_gradient, weight_gradient = cotangents
    if inside != at:
        weight_gradient = jax.lax.with_sharding_constraint(weight_gradient, inside)
    return jax.lax.optimization_barrier((input_gradient, jax.lax.with_sharding_constraint(weight_gradient, at)))


_reduced.defvjp(_reduced_forward, _reduced_backward)

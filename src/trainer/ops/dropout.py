"""Dropout with an explicit PRNG key. A row's mask depends only on this key and the row's index in the global batch."""

import jax
import jax.numpy as jnp


def _row_keys(key: jax.Array, row_b: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_b)


def dropout(x: jax.Array, key: jax.Array | None, row_b: jax.Array, rate: float) -> jax.Array:
    """Sets each entry of `x` [b, ...] to zero with probability `rate`, and scales the others by 1 / (1 - rate).

    Row i draws its mask from `key` folded with `row_b[i]`, so the mask does not depend on the mesh or the split into
    microbatches. Returns `x` unchanged if `key` is None or `rate` is 0.
    """
    if key is None or rate == 0:
        return x
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(_row_keys(key, row_b))
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def attention_keep(
    key: jax.Array, row_b: jax.Array, query_t: jax.Array, heads: int, keys: int, rate: float
) -> jax.Array:
    """Returns the mask of attention weights that dropout keeps: bool [b, h, t, s].

    A query's mask depends on its row and on its index `query_t` in the row, so an op that processes queries in blocks
    draws the same mask as an op that processes all queries at once.
    """

    def one(row_key: jax.Array, query: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(row_key, query), 1 - rate, (heads, keys))

    keep_bths = jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))(_row_keys(key, row_b), query_t)
    return keep_bths.swapaxes(1, 2)

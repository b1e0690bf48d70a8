"""Batch-invariant attention: the bits of a query's result depend only on its sequence.

XLA's CPU backend multiplies and sums in an order that depends on shapes. Therefore, queries are processed here in
blocks of `QUERIES`, and sums over keys are computed in tiles of `TILE` keys, which are added in order. A tile that a
query does not see adds zero. Therefore, the result is the same in training, in a prefill, and over a cache of any
length, provided that in each case the sequence begins at an index that is a multiple of `TILE`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.capabilities.invariant_keys import QUERIES, TILE
from trainer.ops.attention import Dropout, Mask, scale_of, visible


def invariant_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes `dot_product_attention`, without dropout. The backward pass recomputes the scores of each block."""
    if dropout is not None:
        raise ValueError("invariant attention does not support dropout")
    rows, length = query.shape[:2]

    def blocks(x: jax.Array) -> jax.Array:
        x = _padded(x, QUERIES)
        return x.reshape(rows, -1, QUERIES, *x.shape[2:]).swapaxes(0, 1)

    key, value, position, segment = (_padded(x, TILE) for x in (key, value, mask.key_position, mask.key_segment))
    # Padding keys get the largest position, so that no query sees them.
    real = jnp.arange(position.shape[1]) < mask.key_position.shape[1]
    position = jnp.where(real, position, jnp.iinfo(jnp.int32).max)
    how = functools.partial(_block, window=window, soft_cap=soft_cap, scale=scale)
    block: Callable[..., jax.Array] = jax.checkpoint(how, prevent_cse=False)

    def step(xs: Any) -> jax.Array:
        query, query_position, query_segment = xs
        return block(query, key, value, sinks, Mask(query_position, position, query_segment, segment))

    out = jax.lax.map(step, tuple(map(blocks, (query, mask.query_position, mask.query_segment))))
    return out.swapaxes(0, 1).reshape(rows, -1, *out.shape[3:])[:, :length]


def rounded(product: jax.Array) -> jax.Array:
    """Returns `product`, float32, and ensures that it is rounded before anything is added to it.

    If a multiplication and the addition that uses its product are in one loop, XLA's CPU backend fuses the two and does
    not round the product. In a sum of two products, the rest of the loop determines which product is not rounded. The
    clip between product and sum prevents the fusion, and changes no finite number.
    """
    most = jnp.finfo(jnp.float32).max
    return jnp.clip(product, -most, most)


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """Returns `x` [b, t, ...] padded with zeros along t, to a multiple of `multiple`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), *((0, 0) for _ in x.shape[2:])))


def _block(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    mask: Mask,
    *,
    window: int,
    soft_cap: float,
    scale: float | None,
) -> jax.Array:
    """Returns the result for queries [b, QUERIES, h, d] over keys [b, s, k, d]: [b, QUERIES, h, d]."""
    rows, length, heads, width = query.shape
    kv_heads, tiles = key.shape[2], key.shape[1] // TILE
    query = query.reshape(rows, length, kv_heads, -1, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
    scores = scores * scale_of(scale, width)
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = visible(mask, window)[:, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    largest = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
    largest = largest if sink is None else jnp.maximum(largest, sink)
    largest = jax.lax.stop_gradient(largest)  # no gradient, because the result does not depend on this maximum
    weights = jnp.where(seen, jnp.exp(scores - largest), 0)
    weights = weights.reshape(*weights.shape[:-1], tiles, TILE)
    values = value.reshape(rows, tiles, TILE, kv_heads, -1)
    parts = jnp.einsum("bkgtnz,bnzkd->nbkgtd", weights.astype(value.dtype), values, preferred_element_type=jnp.float32)
    totals = jnp.moveaxis(weights.sum(axis=-1), -1, 0)
    zeros = jnp.zeros(parts.shape[1:], jnp.float32), jnp.zeros(totals.shape[1:], jnp.float32)
    (out, total), _ = jax.lax.scan(lambda sum, part: (jax.tree.map(jnp.add, sum, part), None), zeros, (parts, totals))
    if sink is not None:
        total = total + jnp.exp(sink - largest)[..., 0]
    # A padding query may see no keys.
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(rows, length, heads, -1).astype(query.dtype)

"""Causal attention over packed segments: a plain reference op and one that never holds the square of scores.

Both take queries [b, t, h, d], keys and values [b, s, k, d] with h a multiple of k (grouped-query attention, Ainslie et
al. 2023, arXiv:2305.13245), and a `Mask`. Scores and softmax are float32, the result has the queries' dtype.

`window` > 0: a query sees its own position and the window - 1 before it. `soft_cap` > 0: scores are bounded by
soft_cap * tanh(scores / soft_cap) before the mask (Gemma 2, arXiv:2408.00118).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.ops.dropout import attention_keep


class Mask(NamedTuple):
    """A query sees the keys of its own segment whose position is not beyond its own."""

    query_position: jax.Array  # [b, t] int
    key_position: jax.Array  # [b, s] int
    query_segment: jax.Array  # [b, t] int
    key_segment: jax.Array  # [b, s] int


class Dropout(NamedTuple):
    """Dropout of attention weights; see `ops.dropout.attention_keep`."""

    key: jax.Array
    row: jax.Array  # [b] int
    rate: float


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> jax.Array:
    """The reference op: [b, t, h, d], with all scores [b, h, t, s] in memory at once."""
    return _attend(query, key, value, mask, dropout, jnp.arange(query.shape[1]), window, soft_cap)


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    block: int = 256,
) -> jax.Array:
    """The same function of its inputs, one block of queries after the other: scores take [b, h, block, s] at a time.

    The backward pass computes each block's scores again, so that neither pass holds the square.
    """
    rows, length = query.shape[:2]
    block = min(block, length)
    count = -(-length // block)

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, count * block - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(rows, count, block, *x.shape[2:]).swapaxes(0, 1)

    index = jnp.arange(count * block).reshape(count, block)

    @jax.checkpoint
    def one(args: tuple[jax.Array, ...]) -> jax.Array:
        query, position, segment, index = args
        block_mask = mask._replace(query_position=position, query_segment=segment)
        return _attend(query, key, value, block_mask, dropout, index, window, soft_cap)

    out = jax.lax.map(one, (blocks(query), blocks(mask.query_position), blocks(mask.query_segment), index))
    return out.swapaxes(0, 1).reshape(rows, count * block, *out.shape[3:])[:, :length]


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None,
    index_t: jax.Array,
    window: int,
    soft_cap: float,
) -> jax.Array:
    rows, length, heads, width = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(rows, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32) * width**-0.5
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = mask.query_position[:, :, None] - mask.key_position[:, None, :]
    visible = (distance >= 0) & (mask.query_segment[:, :, None] == mask.key_segment[:, None, :])
    if window:
        visible &= distance < window
    # Finite, so that a query that sees nothing (padding of a block) gives no NaN.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if dropout is not None:
        keep = attention_keep(dropout.key, dropout.row, index_t, heads, key.shape[1], dropout.rate)
        weights = jnp.where(keep.reshape(weights.shape), weights / (1 - dropout.rate), 0.0)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value)
    return out.reshape(rows, length, heads, width)

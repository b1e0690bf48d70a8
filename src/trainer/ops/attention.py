"""Causal attention over packed segments: the reference op. Tests compare all other attention ops with it.

Every attention op has the same signature and computes the same function of queries [b, t, h, d], keys and values
[b, s, k, d] with h a multiple of k (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245), and a `Mask`. The
width of values may differ from d; the result has the width of the values. Scores and softmax are float32; the result
has the queries' dtype. An op raises ValueError for anything it does not support.

`sums`: the dtype in which the CPU backend accumulates the weighted values (`sharding.sum_dtype`); None: the values'
dtype.

`scale`: the factor on the products of queries and keys; None: 1 / sqrt(d).

`sinks`: float32 [h], the logit of an additional key per head whose value is zero and to which every query attends
(gpt-oss, arXiv:2508.10925); None: no sinks.

`window` > 0: a query sees its own position and the window - 1 positions before it. `soft_cap` > 0: before masking,
scores are replaced by soft_cap * tanh(scores / soft_cap), which bounds them (Gemma 2, arXiv:2408.00118).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.ops.dropout import attention_keep


class Mask(NamedTuple):
    """A causal mask: a query attends to keys of the same segment at its own and at earlier positions."""

    query_position: jax.Array  # [b, t] int
    key_position: jax.Array  # [b, s] int
    query_segment: jax.Array  # [b, t] int
    key_segment: jax.Array  # [b, s] int
    # [b, n] int, the lengths of the segments (`ops.documents`), for kernels that read lengths; None: lengths are not
    # given, and rows may have any number of segments.
    documents: jax.Array | None = None

    def in_chunks(self, size: int) -> "Mask":
        """Returns a mask for chunked attention: with `window` = `size`, a query sees only keys in its chunk of its
        document.

        The even chunks of a document become one segment, and the odd chunks another. The window separates the chunks of
        one segment, which are at least `size` positions apart.
        """

        def halves(segment: jax.Array, position: jax.Array) -> jax.Array:
            return jnp.where(segment > 0, 2 * segment + position // size % 2, segment)  # padding stays padding

        query, key = (self.query_segment, self.query_position), (self.key_segment, self.key_position)
        return self._replace(query_segment=halves(*query), key_segment=halves(*key), documents=None)


class Dropout(NamedTuple):
    """Dropout of attention weights; see `ops.dropout.attention_keep`.

    A device that computes a part of a row's weights draws the mask of the whole row and uses the corresponding part.
    """

    key: jax.Array
    row: jax.Array  # [b] int, the indices of the rows in the global batch
    rate: float
    whole: tuple[int, int] | None = None  # the numbers of heads and of keys in a whole row; None: as in the call
    first_head: jax.Array | int = 0  # the index of the call's first head among all heads
    first_query: jax.Array | int = 0

    def keep(self, query_t: jax.Array, heads: int, keys: int, first_key: jax.Array | int = 0) -> jax.Array:
        """Returns the mask of kept weights, bool [b, heads, t, keys]. `query_t`: int [t], the indices of the queries in
        the call. `first_key`: the index of the call's first key in the row."""
        if self.whole is None:
            return attention_keep(self.key, self.row, query_t, heads, keys, self.rate)
        drawn = attention_keep(self.key, self.row, self.first_query + query_t, *self.whole, self.rate)
        drawn = jnp.pad(drawn, ((0, 0), (0, 0), (0, 0), (0, keys)))  # keys past the row's end are block padding
        drawn = jax.lax.dynamic_slice_in_dim(drawn, self.first_head, heads, axis=1)
        return jax.lax.dynamic_slice_in_dim(drawn, first_key, keys, axis=3)


def dot_product_attention(
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
    sums: jnp.dtype | None = None,
) -> jax.Array:
    """Computes attention: [b, t, h, d]. The reference op, which materializes all scores [b, h, t, s]."""
    keep, rate = None, 0.0
    if dropout is not None:
        rate = dropout.rate
        keep = dropout.keep(jnp.arange(query.shape[1]), query.shape[2], key.shape[1])
    return attend(query, key, value, mask, keep, rate, window, soft_cap, scale, sinks, sums)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    keep_bhts: jax.Array | None,
    rate: float,
    window: int,
    soft_cap: float,
    scale: float | None,
    sinks: jax.Array | None,
    sums: jnp.dtype | None,
) -> jax.Array:
    """Computes attention: [b, t, h, d]. `keep_bhts`: the mask of the weights to keep, which are scaled by 1 /
    (1 - rate); None: no dropout."""
    rows, length, heads, width = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(rows, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
    scores = scores * scale_of(scale, width)
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # A finite number, so that the result for a fully masked query (block padding) is not NaN.
    scores = jnp.where(visible(mask, window)[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    if keep_bhts is not None:
        weights = jnp.where(keep_bhts.reshape(weights.shape), weights / (1 - rate), 0.0)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value, preferred_element_type=sums)
    return out.reshape(rows, length, heads, value.shape[-1]).astype(value.dtype)


def scale_of(scale: float | None, width: int) -> float:
    """Returns the factor on the dot products of queries and keys: `scale`, or 1 / sqrt(`width`) if `scale` is None."""
    return width**-0.5 if scale is None else scale


def visible(mask: Mask, window: int) -> jax.Array:
    """Returns whether a query sees a key: bool [b, t, s]."""
    distance = mask.query_position[:, :, None] - mask.key_position[:, None, :]
    seen = (distance >= 0) & (mask.query_segment[:, :, None] == mask.key_segment[:, None, :])
    return seen & (distance < window) if window else seen

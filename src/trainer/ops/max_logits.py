"""Computes the largest attention logit of each head for QK-Clip, because no attention kernel returns it."""

from typing import Any

import jax
import jax.numpy as jnp

from trainer.ops.attention import Mask, scale_of, visible

BLOCK = 512  # default tile size in tokens


def max_logits(
    query: jax.Array,
    key: jax.Array,
    mask: Mask,
    *,
    window: int = 0,
    scale: float | None = None,
    block: int = BLOCK,
    when: jax.Array | None = None,
) -> jax.Array:
    """Returns each head's largest attention logit (q . k * scale) over the queries and keys of a batch: float32 [h].

    Considers only pairs of a query and a key that the query sees, and ignores padding (segment 0). If there is no pair,
    the result is a finite number below any logit. The result has no gradient. The logits are recomputed tile by tile;
    each tile needs memory for [b, h, block, block] float32 numbers. Tiles above the diagonal or outside of the window
    are skipped, so query i and key i must be the same token, and positions must grow by one along a segment.

    Args:
      query, key: [b, t, h, d] and [b, t, k, d], the operands of the attention op.
      mask: the mask of the attention op.
      window, scale: see `ops.attention`.
      block: the side length of a tile, in tokens. If one tile covers the whole row, the product is the same as in
        `dot_product_attention`, and the compiler merges the two products, unless `when` is given.
      when: bool []. If false, nothing is computed and the result is a finite number below any logit. None: true.
    """
    query, key = jax.lax.stop_gradient((query, key))
    if when is None and query.shape[1] <= block:
        return _max_logits(query, key, mask, window, scale, block)

    @jax.checkpoint
    def apart(query: jax.Array, key: jax.Array, mask: Mask) -> jax.Array:
        # All layers of a scan share the masks. So without checkpointing, differentiation would compute the masks of all
        # tiles and heads before the scan, and store them.
        if when is None:
            return _max_logits(query, key, mask, window, scale, block)
        nothing = jnp.full(query.shape[2], jnp.finfo(jnp.float32).min)
        return jax.lax.cond(when, lambda: _max_logits(query, key, mask, window, scale, block), lambda: nothing)

    return apart(query, key, mask)


def _max_logits(
    query: jax.Array, key: jax.Array, mask: Mask, window: int, scale: float | None, block: int
) -> jax.Array:
    rows, length, heads, width = query.shape
    query = query.reshape(rows, length, key.shape[2], -1, width)
    block = min(block, length)
    count = -(-length // block)
    queries = query, mask.query_position, mask.query_segment
    keys = key, mask.key_position, mask.key_segment
    if padding := count * block - length:
        queries, keys = jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)), (queries, keys)
        )

    def part(arrays: Any, i: jax.Array) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=1), arrays)

    def tile(queries: Any, keys: Any) -> jax.Array:
        (query, query_position, query_segment), (key, key_position, key_segment) = queries, keys
        logits = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
        seen = visible(Mask(query_position, key_position, query_segment, key_segment), window)
        counts = seen & (query_segment != 0)[:, :, None]
        return jnp.where(counts[:, None, None], logits, jnp.finfo(jnp.float32).min).max(axis=(-2, -1))

    # The smallest distance from a query back to a key in tile (i, j) is (i - j) * block - (block - 1).
    tiles = [(i, j) for i in range(count) for j in range(i + 1) if not window or (i - j - 1) * block + 1 < window]
    if len(tiles) == 1:
        largest = tile(queries, keys)[None]
    else:
        # Returns all tiles' maxima instead of carrying one maximum, so that the compiler shards each tile's result by
        # rows and heads, like the operands.
        largest = jax.lax.map(lambda at: tile(part(queries, at[0]), part(keys, at[1])), tuple(jnp.array(tiles).T))
    return largest.max(axis=(0, 1)).reshape(heads) * scale_of(scale, width)

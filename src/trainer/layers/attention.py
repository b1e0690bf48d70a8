"""Self-attention with grouped queries, rotary positions, packed segments and a key-value cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer.layers.dense import Dense
from trainer.ops import attention as ops
from trainer.ops.rope import rope

OPS = {"dot_product": ops.dot_product_attention, "flash": ops.blockwise_attention}


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, each [b, s, k, d] ([layers, b, s, k, d] for a stack)."""

    key: jax.Array
    value: jax.Array


class Attention(nnx.Module):
    """Multi-head self-attention. The scale 1 / sqrt(head_dim) is applied to the scores, not held in the weights."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        op: str,
        timescales: tuple[float, float],
        dropout_rate: float,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """`op`: a name of OPS. `timescales`: shortest and longest of the rotary positions, see `ops.rope`."""
        dense = functools.partial(Dense, dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)
        self.op, self.timescales, self.dropout_rate = op, timescales, dropout_rate
        self.query = dense([width], [heads, head_dim], ("embed", "heads", "head_dim"))
        self.key = dense([width], [kv_heads, head_dim], ("embed", "kv_heads", "head_dim"))
        self.value = dense([width], [kv_heads, head_dim], ("embed", "kv_heads", "head_dim"))
        self.out = dense([heads, head_dim], [width], ("heads", "head_dim", "embed"))

    def __call__(
        self,
        x_bte: jax.Array,
        cache: KVCache | None,
        position_bt: jax.Array,
        segment_bt: jax.Array,
        row_b: jax.Array,
        key: jax.Array | None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Attend within each segment to positions not beyond one's own: [b, t, e] and the cache with them added.

        With a cache, the keys and values of `position_bt` are written to those places of it and the queries see all
        places up to their own; each row then holds one segment.
        """
        low, high = self.timescales
        rotate = functools.partial(rope, position_bt=position_bt, min_timescale=low, max_timescale=high)
        query_names = ("activation_batch", "activation_length", "activation_heads", None)
        key_names = ("activation_batch", "activation_length", "activation_kv_heads", None)
        queries = rotate(checkpoint_name(self.query(x_bte, query_names), "query_proj"))
        keys = rotate(checkpoint_name(self.key(x_bte, key_names), "key_proj"))
        values = checkpoint_name(self.value(x_bte, key_names), "value_proj")

        mask = ops.Mask(position_bt, position_bt, segment_bt, segment_bt)
        if cache is not None:
            rows = jnp.arange(x_bte.shape[0])[:, None]
            keys = cache.key.at[rows, position_bt].set(keys.astype(cache.key.dtype))
            values = cache.value.at[rows, position_bt].set(values.astype(cache.value.dtype))
            cache = KVCache(keys, values)
            places = jnp.broadcast_to(jnp.arange(keys.shape[1]), keys.shape[:2])
            mask = ops.Mask(position_bt, places, segment_bt, jnp.broadcast_to(segment_bt[:, :1], keys.shape[:2]))

        drop = ops.Dropout(key, row_b, self.dropout_rate) if key is not None and self.dropout_rate else None
        attended = OPS[self.op](queries, keys, values, mask, drop)
        out = self.out(attended, ("activation_batch", "activation_length", "activation_embed"))
        return checkpoint_name(out, "out_proj"), cache

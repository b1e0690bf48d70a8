"""Attention in blocks of queries, in plain XLA. Neither the forward nor the backward pass materializes the full score
matrix.

The backward pass recomputes each block's scores. It is written by hand so that a block's key gradients are added only
to the keys that the block reads. Autodiff of a loop over slices would, for every block, add an array with the gradients
of all keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.ops.attention import Dropout, Mask, attend
from trainer.ops.dropout import attention_keep


class _Static(NamedTuple):
    """Static parameters. Query block i reads `reach` keys, from index i * `stride` on."""

    stride: int
    reach: int
    length: int  # keys per row, without padding
    window: int
    soft_cap: float
    scale: float | None
    rate: float
    sums: jnp.dtype | None


class _Context(NamedTuple):
    """Inputs that have no gradient. The queries' arrays are divided into n blocks; the keys' arrays are [b, s]."""

    query_index: jax.Array  # [n, t], index within the row
    query_position: jax.Array  # [n, b, t]
    query_segment: jax.Array  # [n, b, t]
    key_position: jax.Array
    key_segment: jax.Array
    dropout_key: jax.Array | None
    row: jax.Array | None  # [b]


def blockwise_attention(
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
    block: int = 256,
) -> jax.Array:
    """Computes `dot_product_attention`, one block of queries at a time, with scores [b, h, block, s].

    With a window, both passes read, for each block, only the block + window - 1 keys that its queries can see. A window
    therefore requires that query i and key i are the same token, and that positions grow by one along a segment.
    Dropout draws the same masks as `dot_product_attention`.
    """
    rows, length = query.shape[:2]
    block = min(block, length)
    count = -(-length // block)
    padding = count * block - length

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(rows, count, block, *x.shape[2:]).swapaxes(0, 1)

    stride, reach = 0, key.shape[1]
    key_position, key_segment = mask.key_position, mask.key_segment
    if window and block + window - 1 < length:
        assert key.shape[1] == length
        stride, reach = block, block + window - 1
        ends = ((0, 0), (window - 1, padding))
        key, value = (jnp.pad(x, (*ends, (0, 0), (0, 0))) for x in (key, value))
        # Padding keys get the largest position, so that no query sees them.
        key_position = jnp.pad(key_position, ends, constant_values=jnp.iinfo(jnp.int32).max)
        key_segment = jnp.pad(key_segment, ends)
    rate = dropout.rate if dropout else 0.0
    static = _Static(stride, reach, mask.key_position.shape[1], window, soft_cap, scale, rate, sums)
    context = _Context(
        jnp.arange(count * block).reshape(count, block),
        blocks(mask.query_position),
        blocks(mask.query_segment),
        key_position,
        key_segment,
        dropout.key if dropout else None,
        dropout.row if dropout else None,
    )
    out = _all_blocks(static, blocks(query), key, value, sinks, context)
    return out.swapaxes(0, 1).reshape(rows, count * block, *out.shape[3:])[:, :length]


def _part(static: _Static, x: jax.Array, i: jax.Array, axis: int = 1) -> jax.Array:
    """Returns the slice of the keys' array `x` that query block i reads."""
    return jax.lax.dynamic_slice_in_dim(x, i * static.stride, static.reach, axis) if static.stride else x


def _one_block(
    static: _Static,
    context: _Context,
    i: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns block i of the output, [b, t, h, d], from the block's queries and the keys and values that it reads."""
    mask = Mask(
        context.query_position[i],
        _part(static, context.key_position, i),
        context.query_segment[i],
        _part(static, context.key_segment, i),
    )
    keep = None
    if context.dropout_key is not None and context.row is not None:
        # Draws the dropout mask for all keys of the row, as the reference op does, even with a window.
        keep = attention_keep(
            context.dropout_key, context.row, context.query_index[i], query.shape[2], static.length, static.rate
        )
        if static.stride:
            after = context.key_position.shape[1] - static.length - (static.window - 1)
            keep = _part(static, jnp.pad(keep, ((0, 0), (0, 0), (0, 0), (static.window - 1, after))), i, axis=3)
    how = static.rate, static.window, static.soft_cap, static.scale, sinks, static.sums
    return attend(query, key, value, mask, keep, *how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_blocks(
    static: _Static, query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None, context: _Context
) -> jax.Array:
    """Maps queries [n, b, t, h, d], keys and values [b, s, k, d] to results [n, b, t, h, d], where the last d is the
    width of the values."""

    def step(_, xs):
        i, query = xs
        return None, _one_block(static, context, i, query, _part(static, key, i), _part(static, value, i), sinks)

    return jax.lax.scan(step, None, (jnp.arange(len(query)), query))[1]


def _forward(static: _Static, *inputs: Any) -> tuple[jax.Array, Any]:
    return _all_blocks(static, *inputs), inputs


def _backward(static: _Static, inputs: Any, out_grad: jax.Array) -> Any:
    query, key, value, sinks, context = inputs

    def add(total: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
        if not static.stride:
            return total + part
        return jax.lax.dynamic_update_slice_in_dim(total, _part(static, total, i) + part, i * static.stride, axis=1)

    def step(totals, xs):
        i, query, out_grad = xs
        block = functools.partial(_one_block, static, context, i)
        arrays = query, _part(static, key, i), _part(static, value, i), sinks
        query_grad, key_grad, value_grad, sink_grad = jax.vjp(block, *arrays)[1](out_grad)
        keys, values, of_sinks = totals
        of_sinks = jax.tree.map(jnp.add, of_sinks, sink_grad)
        return (add(keys, key_grad, i), add(values, value_grad, i), of_sinks), query_grad

    # float32, because a key's gradient is a sum over many blocks.
    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (key, value, sinks))
    totals, query_grad = jax.lax.scan(step, totals, (jnp.arange(len(query)), query, out_grad))
    return query_grad, *jax.tree.map(lambda total, x: total.astype(x.dtype), totals, (key, value, sinks)), None


_all_blocks.defvjp(_forward, _backward)

"""The documents of a row by their lengths: int [b, n], in their order. Rows with fewer than n documents have zeros.

n = 0: each row is one document. n = 1: one document, and padding, which attends to nothing. n > 1: up to n - 1
documents, and padding, which is one more, so that the lengths are those of the whole row. These and the segments of a
`Mask` say the same, in a form from which a kernel computes without a mask for each pair of tokens.
"""

import jax
import jax.numpy as jnp


def lengths(segment_bt: jax.Array, most: int) -> jax.Array:
    """Returns the lengths of the documents of rows with at most `most` documents, whose segments are 1, 2, ..., and 0
    for padding. A row of padding is a document of one token, because kernels want at least one."""
    if not most:
        return jnp.zeros((len(segment_bt), 0), jnp.int32)
    found = (segment_bt[:, :, None] == jnp.arange(1, most + 1)).sum(axis=1, dtype=jnp.int32)
    if most == 1:
        return jnp.maximum(found, 1)
    return jnp.concatenate([found, segment_bt.shape[1] - found.sum(axis=1, keepdims=True)], axis=1)


def part_of_token(length_bn: jax.Array, tokens: int) -> jax.Array:
    """Returns to which of its row's documents, from 0, each token belongs: int [b, t]."""
    ends = jnp.cumsum(length_bn, axis=1)
    return (jnp.arange(tokens)[None, :, None] >= ends[:, None, :]).sum(axis=2)


def packed(length_bn: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the documents of all rows one after the other, without those of no tokens: their lengths [b n], then
    zeros; and the index of the first token of each in an array of all rows of `tokens` tokens, [b n + b], then the
    number of all tokens.
    """
    rows, most = length_bn.shape
    first_bn = jnp.cumsum(length_bn, axis=1) - length_bn + tokens * jnp.arange(rows)[:, None]
    real = (length_bn > 0).ravel()
    place = jnp.where(real, jnp.cumsum(real) - 1, rows * (most + 1))  # an index past the end is dropped
    sizes = jnp.zeros(rows * most, jnp.int32).at[place].set(length_bn.ravel(), mode="drop")
    starts = jnp.full(rows * (most + 1), rows * tokens, jnp.int32).at[place].set(first_bn.ravel(), mode="drop")
    return sizes, starts

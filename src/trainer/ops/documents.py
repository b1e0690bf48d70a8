"""The documents of a row by their lengths: int [b, n], in their order. Rows with fewer than n documents have zeros.

n = 0: each row is one document. n = 1: one document, and padding, which attends to nothing. These and `Mask`'s segments
say the same, in a form from which a kernel computes without a mask for each pair of tokens.
"""

import jax
import jax.numpy as jnp


def lengths(segment_bt: jax.Array, most: int) -> jax.Array:
    """Returns the lengths of the documents of rows with at most `most` documents, whose segments are 1, 2, ..., and 0
    for padding. A row of padding is a document of one token, because kernels want at least one."""
    if not most:
        return jnp.zeros((len(segment_bt), 0), jnp.int32)
    count_b1 = (segment_bt == 1).sum(axis=1, keepdims=True, dtype=jnp.int32)
    return jnp.maximum(count_b1, 1)

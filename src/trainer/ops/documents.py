"""The lengths of each row's documents, in order: int [b, n].

If n = 0, each row is one document. If n = 1, each row is one document followed by padding, which attends to nothing. If
n > 1, each row contains up to n - 1 documents. The first n - 1 lengths are those of the documents, followed by zeros if
there are fewer. The last length is that of the padding, which counts as a document, so that the lengths sum to the
length of the row. The lengths are equivalent to the segments of a `Mask`, but a kernel that reads lengths needs no mask
over pairs of tokens.
"""

import jax
import jax.numpy as jnp


def lengths(segment_bt: jax.Array, most: int) -> jax.Array:
    """Returns the lengths of documents (see the module's docstring) from the segments of rows with at most `most`
    documents each. Segments are numbered from 1, and 0 is padding. n is `most` if `most` is 0 or 1, else `most` + 1.
    With `most` = 1, a row of only padding gets a document of one token, because kernels require a document."""
    if not most:
        return jnp.zeros((len(segment_bt), 0), jnp.int32)
    found = (segment_bt[:, :, None] == jnp.arange(1, most + 1)).sum(axis=1, dtype=jnp.int32)
    if most == 1:
        return jnp.maximum(found, 1)
    return jnp.concatenate([found, segment_bt.shape[1] - found.sum(axis=1, keepdims=True)], axis=1)


def part_of_token(length_bn: jax.Array, tokens: int) -> jax.Array:
    """Returns the index of each token's document within the row, from 0: int [b, t]."""
    ends = jnp.cumsum(length_bn, axis=1)
    return (jnp.arange(tokens)[None, :, None] >= ends[:, None, :]).sum(axis=2)


def packed(length_bn: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays about the non-empty documents of all rows, in order: their lengths, [b n], padded with zeros;
    and the indices of their first tokens, [b n + b], padded with the number of all tokens. The indices count through
    all rows, each of which has `tokens` tokens.
    """
    rows, most = length_bn.shape
    first_bn = jnp.cumsum(length_bn, axis=1) - length_bn + tokens * jnp.arange(rows)[:, None]
    real = (length_bn > 0).ravel()
    place = jnp.where(real, jnp.cumsum(real) - 1, rows * (most + 1))  # an index past the end is dropped
    sizes = jnp.zeros(rows * most, jnp.int32).at[place].set(length_bn.ravel(), mode="drop")
    starts = jnp.full(rows * (most + 1), rows * tokens, jnp.int32).at[place].set(first_bn.ravel(), mode="drop")
    return sizes, starts


def document_numbers(position_bt: jax.Array, segment_bt: jax.Array) -> jax.Array:
    """Returns the number of documents that began in each row up to each token: int32 [b, t].

    A document begins at position 0 or where the segment changes. If a row's first token has a later position, it does
    not begin a document, because the row may continue an earlier call. Padding (segment 0) never begins a document.
    """
    changes = jnp.pad(segment_bt[:, 1:] != segment_bt[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum((segment_bt != 0) & ((position_bt == 0) | changes), axis=1, dtype=jnp.int32)

"""Values per segment of packed rows. The segments of a row are the sequences that share it.

Segment ids count from 1 in each row, and 0 is padding. An array over segments is [b, t + 1]: entry k of a row belongs
to segment k, entry 0 to padding, and entries after the last segment are 0.
"""

import jax
import jax.numpy as jnp


def segment_sums(values_bt: jax.Array, segment_bt: jax.Array) -> jax.Array:
    """Returns the sum of `values_bt` over the tokens of each segment, [b, t + 1]."""
    count = segment_bt.shape[-1] + 1
    return jax.vmap(lambda values, segment: jax.ops.segment_sum(values, segment, count))(values_bt, segment_bt)


def of_tokens(values_bs: jax.Array, segment_bt: jax.Array) -> jax.Array:
    """Returns, for each token, the value of its segment, [b, t]."""
    return jnp.take_along_axis(values_bs, segment_bt, axis=-1)

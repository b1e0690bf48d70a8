"""Shifts arrays of packed rows to the left, within their segments."""

import jax
import jax.numpy as jnp


def shift_left(x_bt: jax.Array) -> jax.Array:
    """Returns x [b, t, ...] shifted left by one along t. The last entry of each row is 0."""
    return jnp.concatenate([x_bt[:, 1:], jnp.zeros_like(x_bt[:, :1])], axis=1)


def still_inside(segment_bt: jax.Array) -> jax.Array:
    """Returns segments int [b, t] in which the last token of each segment becomes padding (0).

    Applied k times, it keeps the tokens whose k successors belong to the same segment.
    """
    return jnp.where(shift_left(segment_bt) == segment_bt, segment_bt, 0)

"""Looking ahead in packed rows: arrays shifted to the left within their segments."""

import jax
import jax.numpy as jnp


def shift_left(x_bt: jax.Array) -> jax.Array:
    """x [b, t, ...] shifted left by one along t; the last entry of each row is 0."""
    return jnp.concatenate([x_bt[:, 1:], jnp.zeros_like(x_bt[:, :1])], axis=1)


def still_inside(segment_bt: jax.Array) -> jax.Array:
    """Segments int [b, t] without the last token of each, which becomes padding (0).

    Applied k times, it leaves those tokens whose k successors belong to the same segment.
    """
    return jnp.where(shift_left(segment_bt) == segment_bt, segment_bt, 0)

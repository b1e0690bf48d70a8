"""Rotary position embedding (Su et al. 2021, RoFormer, arXiv:2104.09864)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rope(NamedTuple):
    """How a head's pairs of entries turn with the position; the fields are the keys of base.yml."""

    min_timescale: float
    max_timescale: float
    kind: str = "default"  # or llama3.1, yarn
    linear_scaling_factor: float = 1.0
    factor: float = 1.0
    original_length: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: bool = False
    interleave: bool = False


def rope(x_bthd: jax.Array, position_bt: jax.Array, how: Rope) -> jax.Array:
    """Rotate the two halves of each head against each other, by angles that grow with the position.

    Pair i of the d / 2 pairs (x[i], x[i + d/2]) turns by position / timescale_i radians; timescales run
    geometrically from `min_timescale` towards `max_timescale`. Computed in float32, returned in x's dtype.
    """
    width = x_bthd.shape[-1]
    exponent = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    timescale = how.min_timescale * (how.max_timescale / how.min_timescale) ** exponent
    angle = position_bt[..., None, None].astype(jnp.float32) / timescale
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x_bthd.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_bthd.dtype)

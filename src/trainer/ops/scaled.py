"""Arrays in 8 bits with scales: an array is close to value * scale, and entries along some axes share a scale."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Scaled(NamedTuple):
    """An array of the scale's dtype, stored in 8 bits."""

    value: jax.Array
    scale: jax.Array  # of size 1 along the axes that share it

    def array(self) -> jax.Array:
        """Returns the array."""
        return self.value.astype(self.scale.dtype) * self.scale


def scaled(array: jax.Array, dtype: jnp.dtype, axes: Sequence[int]) -> Scaled:
    """Returns `array` in `dtype`, whose largest number is that of the largest entry along `axes`.

    The scale is rounded before it divides, so its rounding does not add to that of the values.
    """
    integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    largest = jnp.abs(array).max(axis=tuple(axes), keepdims=True).astype(jnp.float32)
    scale = (largest / most).astype(array.dtype)
    units = array.astype(jnp.float32) / jnp.where(scale == 0, 1, scale).astype(jnp.float32)
    # A cast to fp8 gives NaN beyond its range, which a scale that was rounded down exceeds.
    units = jnp.clip(jnp.rint(units) if integer else units, -most, most)
    return Scaled(units.astype(dtype), scale)

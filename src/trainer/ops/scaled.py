"""8-bit arrays with scales: an array is approximately value * scale. Entries along some axes share a scale."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Scaled(NamedTuple):
    """An array stored as 8-bit values and their scales. The dequantized array has the scale's dtype."""

    value: jax.Array
    scale: jax.Array  # size 1 along the axes whose entries share a scale

    def array(self) -> jax.Array:
        """Returns the dequantized array."""
        return self.value.astype(self.scale.dtype) * self.scale


def scaled(array: jax.Array, dtype: jnp.dtype, axes: Sequence[int]) -> Scaled:
    """Returns `array` quantized to `dtype`. The largest magnitude along `axes` maps to the dtype's largest number.

    The scale is rounded before the division, so the rounding of the scale adds no error to the values.
    """
    integer = jnp.issubdtype(dtype, jnp.integer)
    most = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    largest = jnp.abs(array).max(axis=tuple(axes), keepdims=True).astype(jnp.float32)
    scale = (largest / most).astype(array.dtype)
    units = array.astype(jnp.float32) / jnp.where(scale == 0, 1, scale).astype(jnp.float32)
    # Values may exceed the range if the scale was rounded down, and a cast to fp8 would turn these values into NaN.
    units = jnp.clip(jnp.rint(units) if integer else units, -most, most)
    return Scaled(units.astype(dtype), scale)

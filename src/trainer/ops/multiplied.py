"""Multiplication by a factor from the configuration."""

import jax
import jax.numpy as jnp


def multiplied(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times `factor`, in x's dtype. The factor is not rounded to that dtype, because bfloat16 would change
    0.22 by 0.1 %."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)

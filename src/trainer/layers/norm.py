"""Normalization."""

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.param import EXACT, param


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis, and multiplies by offset + scale.

    See Zhang and Sennrich, arXiv:1910.07467. The scale is learned, and offset + scale is 1 initially. The result is
    computed in float32 and returned in `dtype`.
    """

    def __init__(self, width: int, *, epsilon: float, dtype: jnp.dtype, weight_dtype: jnp.dtype, offset: float = 0.0):
        """`weight_dtype`: unused, because norms are float32 (`EXACT`). `offset`: 1 in Gemma, so that weight decay pulls
        the factor towards 1."""
        del weight_dtype
        self.epsilon, self.offset = epsilon, offset
        self.dtype = dtype
        self.scale = param(jnp.full(width, 1 - offset, EXACT), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = normalized(x, self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (x * (self.offset + scale if self.offset else scale)).astype(self.dtype)


def normalized(x: jax.Array, epsilon: float) -> jax.Array:
    """Returns `x` divided by its root mean square over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


class LayerNorm(nnx.Module):
    """Subtracts the mean over the last axis, divides by the standard deviation, multiplies by offset + scale and adds a
    bias (Ba et al. 2016, arXiv:1607.06450).

    Scale and bias are learned; offset + scale is 1 initially, and the bias is 0. The result is computed in float32 and
    returned in `dtype`.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        offset: float = 1.0,
        bias: bool = True,
    ):
        """`weight_dtype`: see `RMSNorm`. `offset`: 0 if the stored scale is the whole factor."""
        del weight_dtype
        self.epsilon, self.offset, self.has_bias = epsilon, offset, bias
        self.dtype = dtype
        self.scale = param(jnp.full(width, 1 - offset, EXACT), ("norm",))
        if bias:
            self.bias = param(jnp.zeros(width, EXACT), ("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        x = x * (self.offset + self.scale[...].astype(jnp.float32))
        return (x + self.bias[...].astype(jnp.float32) if self.has_bias else x).astype(self.dtype)

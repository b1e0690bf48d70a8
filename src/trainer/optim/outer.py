"""The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv:2311.08105), and the exchange of outer gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from trainer.config.keys import Config


def make_outer_optimizer(config: Config) -> optax.GradientTransformation:
    """Returns SGD with Nesterov momentum at a constant rate. Outer gradients and momentum are float32.

    With l = `diloco_outer_lr` and m = `diloco_outer_momentum`, an outer gradient g updates the momentum to v = m v + g
    and moves the parameters by -l (m v + g).
    """
    momentum = config.diloco_outer_momentum or None
    return optax.sgd(config.diloco_outer_lr, momentum, nesterov=True, accumulator_dtype=jnp.float32)


def sent(dtype: str, grads: Any, shardings: Any) -> Any:
    """Returns the outer gradients of all islands as every island receives them, in float32.

    Args:
      dtype: `diloco_outer_grad_dtype`. With float32, `grads` are returned unchanged, and the caller's mean over
        islands becomes an all-reduce. With bfloat16 or int8, the gradients are rounded and all-gathered, so that no sum
        is computed in low precision.
      grads: float32, each leaf [islands, ...].
      shardings: the shardings of the parameters.
    """
    if dtype == "float32":
        return grads
    return jax.tree.map(_sent_as_bfloat16 if dtype == "bfloat16" else _sent_as_int8, grads, shardings)


def _sent_as_bfloat16(grad: jax.Array, sharding: NamedSharding) -> jax.Array:
    # Bitcast to integers, because XLA would otherwise convert to float32 before the all-gather.
    bits = jax.lax.bitcast_convert_type(grad.astype(jnp.bfloat16), jnp.uint16)
    return jax.lax.bitcast_convert_type(_gathered(bits, sharding), jnp.bfloat16).astype(jnp.float32)


def _sent_as_int8(grad: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns `grad` all-gathered. Each row (along the last axis) is rounded to multiples of 1/127 of the largest
    magnitude in the row."""
    if grad.ndim == 1:  # one number per island, which is not rounded
        return grad
    largest = jnp.max(jnp.abs(grad), -1, keepdims=True)
    scale = jnp.where(largest == 0, 1, largest) / 127  # a NaN in a row makes the whole row NaN
    of_rows = sharding.update(spec=PartitionSpec(*[*sharding.spec, *[None] * grad.ndim][: grad.ndim - 2]))
    numbers = jnp.round(grad / scale).astype(jnp.int8)
    return _gathered(numbers, sharding).astype(jnp.float32) * _gathered(scale, of_rows)


def _gathered(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns `x` [islands, ...] all-gathered over islands, and sharded by `sharding` within each island."""
    apart, together = (sharding.update(spec=PartitionSpec(axis, *sharding.spec)) for axis in ("diloco", None))
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, apart), together)

"""The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv:2311.08105), and how it gets its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec


def make_outer_optimizer(config: Any) -> optax.GradientTransformation:
    """SGD with Nesterov momentum at a constant rate, which takes float32 outer gradients; its momentum is float32 too.

    With rate `diloco_outer_lr` l and `diloco_outer_momentum` m, an outer gradient g makes v = m v + g and moves the
    parameters by -l (m v + g).
    """
    momentum = config.diloco_outer_momentum or None
    return optax.sgd(config.diloco_outer_lr, momentum, nesterov=True, accumulator_dtype=jnp.float32)


def sent(dtype: str, grads: Any, shardings: Any) -> Any:
    """What every island receives of the outer gradients of all.

    Args:
      dtype: `diloco_outer_grad_dtype`. float32: nothing is done here, the mean that follows becomes an all-reduce.
        bfloat16, int8: they are rounded and all-gathered, so that no sum is taken in few bits; the result is float32.
      grads: float32, each leaf [islands, ...].
      shardings: of the parameters.
    """
    if dtype == "float32":
        return grads
    return jax.tree.map(_sent_as_bfloat16 if dtype == "bfloat16" else _sent_as_int8, grads, shardings)


def _sent_as_bfloat16(grad: jax.Array, sharding: NamedSharding) -> jax.Array:
    # As bits: XLA would move a conversion to float32 to before the all-gather.
    bits = jax.lax.bitcast_convert_type(grad.astype(jnp.bfloat16), jnp.uint16)
    return jax.lax.bitcast_convert_type(_gathered(bits, sharding), jnp.bfloat16).astype(jnp.float32)


def _sent_as_int8(grad: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Rounded to multiples of 1/127 of the largest number of its row, the last axis."""
    if grad.ndim == 1:  # a number of each island
        return grad
    largest = jnp.max(jnp.abs(grad), -1, keepdims=True)
    scale = jnp.where(largest == 0, 1, largest) / 127  # NaN in a row makes all of it NaN
    of_rows = sharding.update(spec=PartitionSpec(*[*sharding.spec, *[None] * grad.ndim][: grad.ndim - 2]))
    numbers = jnp.round(grad / scale).astype(jnp.int8)
    return _gathered(numbers, sharding).astype(jnp.float32) * _gathered(scale, of_rows)


def _gathered(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """`x` [islands, ...] on every island, sharded there as `sharding`."""
    apart, together = (sharding.update(spec=PartitionSpec(axis, *sharding.spec)) for axis in ("diloco", None))
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, apart), together)

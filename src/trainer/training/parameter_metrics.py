"""Metrics of parameters, gradients and updates: norms per layer, and the share of updates that rounding discards."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer.sharding import leading

GRAD_NORM, PARAM_NORM, UPDATE_RATIO = "grad_norm/", "param_norm/", "update_ratio/"


def parameter_metrics(
    axes: Mapping[str, Any],
    grads: Mapping[str, jax.Array],
    params: Mapping[str, jax.Array],
    updates: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns three metrics per parameter, float32 [layers], or [] for a parameter outside the layer stacks.

    grad_norm/NAME and param_norm/NAME are L2 norms. update_ratio/NAME is the norm of the update divided by the norm of
    the parameter, 0 if the parameter is all zeros.

    Args:
      axes: the logical axes of each parameter, by name.
      grads: gradients of the trained parameters, by name, before clipping.
      params: parameters before the update.
      updates: the updates that the optimizer adds to the parameters.
    """
    metrics = {}
    for name, param in params.items():
        of_param = _norm(param, axes[name])
        metrics[GRAD_NORM + name] = _norm(grads[name], axes[name])
        metrics[PARAM_NORM + name] = of_param
        ratio = _norm(updates[name], axes[name]) / jnp.where(of_param > 0, of_param, 1)
        metrics[UPDATE_RATIO + name] = jnp.where(of_param > 0, ratio, 0)
    return metrics


def lost_updates(params: Any, updates: Any) -> dict[str, jax.Array]:
    """Returns the metric lost_updates, float32 []: the share of trained values that rounding leaves unchanged, because
    their nonzero update is smaller than half the distance to the next number of the dtype. Returns {} if all parameters
    are float32.

    Args:
      params: the trained parameters before the update, a tree.
      updates: the updates that the optimizer adds to `params`, float32.
    """
    pairs = [*zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True)]
    lost = [_lost(param, update) for param, update in pairs if param.dtype != jnp.float32]
    return {"lost_updates": jnp.stack(lost).sum() / float(sum(param.size for param, _ in pairs))} if lost else {}


def is_due(period: int, step: int, name: str) -> bool:
    """Returns whether step `step` computes the metric `name`: a parameter metric only if `step` is a multiple of
    `period`, any other metric always."""
    return period == 0 or step % period == 0 or not name.startswith((GRAD_NORM, PARAM_NORM, UPDATE_RATIO))


def _lost(param: jax.Array, update: jax.Array) -> jax.Array:
    _, exponent = jnp.frexp(param.astype(jnp.float32))  # |param| is in [1/2, 1) times 2^exponent
    half_spacing = jnp.ldexp(jnp.float32(jnp.finfo(param.dtype).eps / 4), exponent)
    lost = (update != 0) & (param != 0) & (jnp.abs(update) < half_spacing)
    # Sum in two steps: an int32 is too small for the largest arrays, and a float32 cannot count beyond 2^24.
    return jnp.atleast_1d(lost).sum(-1, dtype=jnp.int32).sum(dtype=jnp.float32)


def _norm(x: jax.Array, names: Any) -> jax.Array:
    stacked = leading(names)
    norms = jnp.sqrt((x.astype(jnp.float32) ** 2).sum(range(stacked, x.ndim)))
    return norms.reshape(-1) if stacked else norms

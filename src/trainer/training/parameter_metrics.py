"""Norms of parameters, gradients and updates, per layer."""

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
    """Returns three metrics per parameter, float32 [layers], or [] for a parameter outside of the stacks.

    grad_norm/NAME and param_norm/NAME are L2 norms. update_ratio/NAME is the norm of the update divided by the norm of
    the parameter, 0 if the parameter is all zeros.

    Args:
      axes: the logical axes of each parameter, by name.
      grads: gradients of the trained parameters, by name, before clipping.
      params: parameters before the update.
      updates: what the optimizer adds to the parameters.
    """
    metrics = {}
    for name, param in params.items():
        of_param = _norm(param, axes[name])
        metrics[GRAD_NORM + name] = _norm(grads[name], axes[name])
        metrics[PARAM_NORM + name] = of_param
        ratio = _norm(updates[name], axes[name]) / jnp.where(of_param > 0, of_param, 1)
        metrics[UPDATE_RATIO + name] = jnp.where(of_param > 0, ratio, 0)
    return metrics


def is_due(period: int, step: int, name: str) -> bool:
    """Returns whether `step` computes the metric `name`: parameter metrics only if `step` is a multiple of `period`."""
    return period == 0 or step % period == 0 or not name.startswith((GRAD_NORM, PARAM_NORM, UPDATE_RATIO))


def _norm(x: jax.Array, names: Any) -> jax.Array:
    stacked = leading(names)
    norms = jnp.sqrt((x.astype(jnp.float32) ** 2).sum(range(stacked, x.ndim)))
    return norms.reshape(-1) if stacked else norms

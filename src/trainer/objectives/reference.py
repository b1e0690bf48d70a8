"""The reference model of an objective: the trained model as it was at the beginning of the run."""

from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.keys import Config
from trainer.objectives.base import Frozen
from trainer.optim.optimizer import trainable


def first_parameters(config: Config, model: Any) -> Frozen:
    """Returns the `frozen` declaration of an objective that reads the run's initial parameters.

    The declaration contains the trained parameters, and None for all others, which stay unchanged in the train state.
    With adapters, the reference is therefore the base model with the initial adapters, and only the adapters are stored
    twice.

    Args:
      config: resolved.
      model: a `backends.Model`.
    """
    params, axes = model.abstract[0], model.param_axes
    mask = trainable(config)(params)
    abstract, names = (jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree) for tree in (params, axes))
    return Frozen(abstract, names, make=None)


def reference_parameters(params: Any, frozen: Any) -> Any:
    """Returns the reference model's parameters, without gradients: the leaves of `frozen`, or those of `params` where
    `frozen` has None."""
    joined = jax.tree.map(
        lambda now, first: now if first is None else first, params, frozen, is_leaf=lambda leaf: leaf is None
    )
    return jax.lax.stop_gradient(joined)


def is_reference(params: Any, frozen: Any) -> jax.Array:
    """Returns whether `params` equal the reference model's parameters, bool []."""
    equal = jax.tree.map(
        lambda first, now: None if first is None else jnp.all(now == first), frozen, params, is_leaf=lambda x: x is None
    )
    return jnp.stack(jax.tree.leaves(equal)).all()

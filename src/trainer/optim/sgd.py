"""Stochastic gradient descent."""

from typing import Any

import jax.numpy as jnp
import optax

from trainer.optim.keys import Given


def sgd(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns gradient descent without weight decay, with heavy-ball momentum if `sgd_momentum` is above 0."""
    momentum = keys.sgd_momentum or None  # optax would store an array even for a momentum of 0
    return optax.sgd(given.schedule, momentum=momentum, accumulator_dtype=jnp.dtype(keys.mu_dtype))

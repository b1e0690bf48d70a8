"""Lion."""

from typing import Any

import jax.numpy as jnp
import optax

from trainer.optim.keys import Given


def lion(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns Lion: updates by the sign of averaged gradients, with decoupled weight decay (Chen et al. 2023,
    arXiv:2302.06675)."""
    return optax.lion(
        given.schedule,
        b1=keys.lion_b1,
        b2=keys.lion_b2,
        mu_dtype=jnp.dtype(keys.mu_dtype),
        weight_decay=keys.lion_weight_decay,
        mask=given.decayed,
    )

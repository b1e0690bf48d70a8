"""AdamW, and AdamW with Nesterov's momentum."""

from typing import Any

import jax.numpy as jnp
import optax

from trainer.optim.keys import Given


def adamw(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    return _adamw(keys, given, nesterov=False)


def nadamw(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns AdamW with Nesterov momentum (Dozat 2016, "Incorporating Nesterov Momentum into Adam")."""
    return _adamw(keys, given, nesterov=True)


def _adamw(keys: Any, given: Given, *, nesterov: bool) -> optax.GradientTransformation:
    return optax.adamw(
        given.schedule,
        b1=keys.adam_b1,
        b2=keys.adam_b2,
        eps=keys.adam_eps,
        eps_root=keys.adam_eps_root,
        weight_decay=keys.adam_weight_decay,
        mu_dtype=jnp.dtype(keys.mu_dtype),
        mask=given.decayed,
        nesterov=nesterov,
    )

"""The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv:2311.08105)."""

from typing import Any

import jax.numpy as jnp
import optax


def make_outer_optimizer(config: Any) -> optax.GradientTransformation:
    """SGD with Nesterov momentum at a constant rate, which takes float32 outer gradients; its momentum is float32 too.

    With rate `diloco_outer_lr` l and `diloco_outer_momentum` m, an outer gradient g makes v = m v + g and moves the
    parameters by -l (m v + g).
    """
    momentum = config.diloco_outer_momentum or None
    return optax.sgd(config.diloco_outer_lr, momentum, nesterov=True, accumulator_dtype=jnp.float32)

"""A custom optimizer: Signum, the sign of averaged gradients (Bernstein et al. 2018, arXiv:1802.04434).

An example for docs/guides/extending.md. In the repository, this file would be src/trainer/optim/signum.py.
"""

from typing import Any

import jax.numpy as jnp
import optax

from trainer.optim.keys import Given


def signum(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns the transformation with the update -learning_rate x (sign(m) + signum_weight_decay x parameter).

    m is the moving average of the gradients: each step sets m to signum_b1 x m + (1 - signum_b1) x gradient.

    Args:
      keys: the keys that `trainer.config.capabilities.optimizers.TRAITS` lists for this optimizer, as attributes.
      given: the learning rate schedule, and the mask of parameters with weight decay.
    """
    return optax.chain(
        optax.ema(keys.signum_b1, debias=False, accumulator_dtype=jnp.dtype(keys.mu_dtype)),
        optax.scale_by_sign(),
        optax.add_decayed_weights(keys.signum_weight_decay, mask=given.decayed),
        optax.scale_by_learning_rate(given.schedule),
    )

"""An optimizer of one's own: Signum, the sign of an average of gradients (Bernstein et al. 2018, arXiv:1802.04434).

The example of docs/guides/extending.md, as src/trainer/optim/signum.py would be.
"""

from typing import Any

import jax.numpy as jnp
import optax

from trainer.optim.keys import Given


def signum(keys: Any, given: Given) -> optax.GradientTransformation:
    """-learning_rate x (sign(m) + signum_weight_decay x parameter), with m = b x m + (1 - b) x gradient, b = signum_b1.

    Args:
      keys: the keys that `TRAITS` lists for it, as attributes.
      given: the learning rate's schedule, and which parameters decay.
    """
    return optax.chain(
        optax.ema(keys.signum_b1, debias=False, accumulator_dtype=jnp.dtype(keys.mu_dtype)),
        optax.scale_by_sign(),
        optax.add_decayed_weights(keys.signum_weight_decay, mask=given.decayed),
        optax.scale_by_learning_rate(given.schedule),
    )

"""Adafactor."""

from typing import Any

import jax.numpy as jnp
import optax

from trainer.optim.by_layer import by_layer
from trainer.optim.keys import Given


def adafactor(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns Adafactor, which estimates Adam's second moment from row and column means (Shazeer and Stern 2018,
    arXiv:1804.04235).

    The rows and columns are the two longest axes of an array. Thresholds and scales use norms of whole arrays. Each
    layer of a stacked parameter counts as one array.
    """
    tx = optax.adafactor(
        given.schedule,
        min_dim_size_to_factor=keys.adafactor_min_dim_size_to_factor,
        decay_rate=keys.adafactor_decay_rate,
        multiply_by_parameter_scale=keys.adafactor_multiply_by_parameter_scale,
        clipping_threshold=keys.adafactor_clipping_threshold or None,
        momentum=keys.adafactor_momentum or None,
        dtype_momentum=jnp.dtype(keys.mu_dtype),
        weight_decay_rate=keys.adafactor_weight_decay or None,
        weight_decay_mask=given.decayed,
    )
    return by_layer(tx, given.param_axes)

"""Simulates an optimizer state from the middle of a run."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from trainer.config.keys import Config
from trainer.optim import spikes

_WINDOWS = [f"opt_state/rules/{spikes.NAME}/{name}" for name in ("loss", "grad_norm")]
_ACCEPTED = f"opt_state/rules/{spikes.NAME}/accepted"
ISLANDS = "inner_state/"  # the train states of DiLoCo's islands, each array with a leading axis
_LEAST = 1e-4  # the smallest ratio of a window's deviation to its mean that float32 represents well


def midway(first: Mapping[str, Any], config: Config) -> dict[str, np.ndarray]:
    """Returns step, optimizer state and `rest` as they might be after half of the schedule. An update from this state
    reveals differences between programs that do not affect the first update.

    Counts are the number of updates. Every value of a floating-point array (moments, averages) is drawn uniformly from
    [0.5, 1] x the array's largest magnitude after the first update. So moments have the magnitude that gradients
    produce, and averages differ from the parameters. The windows of the spike rule are full. For any
    skip_step_scaling_factor, the rule accepts a step like the first one, but would refuse it if the bound omitted the
    deviation. If the bound omitted the mean, the rule would refuse the step for factors up to 0.5 / `_LEAST`.

    Args:
      first: step, optimizer state and `rest` by name, after one update.
      config: resolved. The values depend only on its seed and on names and shapes, not on devices or shardings.
    """
    updates = max(1, config.learning_rate_schedule_steps // 2)

    def one(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith(ISLANDS):
            return np.stack([one(name.removeprefix(ISLANDS), island) for island in array])
        # Unchanged. Only DiLoCo's islands have parameters here.
        if name.startswith(("rest/", "params/")) or name == "in_flight":
            return array
        if jnp.issubdtype(array.dtype, jnp.integer) and not array.ndim:
            filled = config.skip_step_interval if name == _ACCEPTED else 0
            return np.full_like(array, updates + filled)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        rng = np.random.default_rng([config.init_weights_seed, zlib.crc32(name.encode())])
        drawn = rng.uniform(0.5, 1, array.shape)
        if name in _WINDOWS:  # a mean of 3/4 and a bound of 5/4 of the first step's value
            drawn = 0.75 + max(0.5 / config.skip_step_scaling_factor, _LEAST) * (drawn - drawn.mean()) / drawn.std()
        return (np.abs(array.astype(np.float32)).max(initial=0) * drawn).astype(array.dtype)

    return {name: one(name, np.array(leaf)) for name, leaf in first.items()}

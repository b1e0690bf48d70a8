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
ISLANDS = "inner_state/"  # the train states of DiLoCo's islands; each array has a leading axis of islands
_LEAST = 1e-4  # the smallest ratio of a window's deviation to its mean that float32 represents well


def midway(first: Mapping[str, Any], config: Config) -> dict[str, np.ndarray]:
    """Returns the step, the optimizer state and the other variables (`rest`) as they might be after half of the
    schedule: a dict from names to arrays. An update from this simulated state reveals differences between programs that
    do not affect the first update.

    Counters are set to the number of updates in half of the schedule. Every value of a floating-point array (moments,
    averages) is drawn uniformly from [0.5, 1] x the array's largest magnitude after the first update. So moments have
    the magnitude that real gradients produce, and averages of parameters differ from the parameters.

    The spike rule (`trainer.optim.spikes`) skips steps whose loss or gradient norm exceeds a bound, which it computes
    from windows of earlier values: mean + skip_step_scaling_factor x standard deviation. The windows are full, and
    drawn so that an error in the bound changes the update. For any factor, the rule accepts a step with the values of
    the first step, but would skip this step if the bound omitted the deviation. For factors up to 0.5 / `_LEAST`, the
    rule would also skip this step if the bound omitted the mean.

    Args:
      first: a dict from names to arrays: the step, the optimizer state and `rest` after one update.
      config: the resolved configuration. The drawn values depend on init_weights_seed and on the names and shapes of
        the arrays, not on devices or shardings.
    """
    updates = max(1, config.learning_rate_schedule_steps // 2)

    def one(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith(ISLANDS):
            return np.stack([one(name.removeprefix(ISLANDS), island) for island in array])
        # These arrays stay unchanged. Parameters occur only in the states of DiLoCo's islands.
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

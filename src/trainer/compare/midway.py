"""Makes an optimizer state like one from the middle of a run, without such a run."""

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
    """Returns step, optimizer state and `rest` as after half of the schedule. Some differences between programs affect
    no first update, but affect an update after this state.

    Counts are the number of updates. Every value of a floating-point array (moments, averages) is drawn uniformly from
    [0.5, 1] x the array's largest magnitude after the first update. So moments have the size that gradients cause, and
    averages differ from the parameters. The windows of the spike rule are full. They are chosen such that the rule
    accepts a step like the first one for any factor, and that it would refuse the step if its bound lacked the mean or
    the deviation (the mean only for factors up to 0.5 / `_LEAST`).

    Args:
      first: step, optimizer state and `rest` by name, after one update.
      config: resolved. The values depend only on its seed and on names and shapes, not on devices or shardings.
    """
    updates = max(1, config.learning_rate_schedule_steps // 2)

    def one(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith(ISLANDS):
            return np.stack([one(name.removeprefix(ISLANDS), island) for island in array])
        # Only DiLoCo's islands have parameters here; they keep them.
        if name.startswith(("rest/", "params/")) or name == "in_flight":
            return array
        if jnp.issubdtype(array.dtype, jnp.integer) and not array.ndim:
            filled = config.skip_step_interval if name == _ACCEPTED else 0
            return np.full_like(array, updates + filled)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        rng = np.random.default_rng([config.init_weights_seed, zlib.crc32(name.encode())])
        drawn = rng.uniform(0.5, 1, array.shape)
        if name in _WINDOWS:  # mean 3/4, and a bound of 5/4, of the first step's
            drawn = 0.75 + max(0.5 / config.skip_step_scaling_factor, _LEAST) * (drawn - drawn.mean()) / drawn.std()
        return (np.abs(array.astype(np.float32)).max(initial=0) * drawn).astype(array.dtype)

    return {name: one(name, np.array(leaf)) for name, leaf in first.items()}

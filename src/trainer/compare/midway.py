"""The optimizer state of a run that is at its middle, without that run."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from trainer.optim import spikes

_ACCEPTED, _WINDOW = (f"opt_state/rules/{spikes.NAME}/{name}" for name in ("accepted", "loss"))


def midway(first: Mapping[str, Any], updates: int, seed: int) -> dict[str, np.ndarray]:
    """Step, optimizer state and `rest` as after `updates` updates: what a first update does not show has an effect in
    the next one.

    Counts are `updates`. Every value of a floating-point array (moments, averages, windows) is drawn uniformly from
    [0.5, 1] x the largest magnitude in the array after the first update. So moments are as large as gradients make
    them, and an average is not the parameters. With the default factor the full window of the spike rule accepts a step
    like the first, and would refuse it if its bound lacked the mean or the deviation.

    Args:
      first: step, optimizer state and `rest` by name, after one update.
      seed: of what is drawn, which depends on names and shapes, not on devices or shardings.
    """

    def one(name: str, array: np.ndarray) -> np.ndarray:
        if name.startswith("rest/"):
            return array
        if jnp.issubdtype(array.dtype, jnp.integer) and not array.ndim:
            filled = first[_WINDOW].size if name == _ACCEPTED else 0
            return np.full_like(array, updates + filled)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        largest = np.abs(array.astype(np.float32)).max(initial=0)
        return (largest * rng.uniform(0.5, 1, array.shape)).astype(array.dtype)

    return {name: one(name, np.array(leaf)) for name, leaf in first.items()}

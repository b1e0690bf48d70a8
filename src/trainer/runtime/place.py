"""From host memory to devices."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding


def place(batch: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
    """A batch on the devices, each array by its sharding. Every process passes the rows that it loaded itself."""
    return {name: jax.make_array_from_process_local_data(shardings[name], array) for name, array in batch.items()}

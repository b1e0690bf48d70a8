"""From host memory to devices."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from trainer.config import UserError


def share_of_rows(sharding: NamedSharding, rows: int) -> dict[str, int]:
    """Which part of each batch of `rows` rows this process loads, as the data room calls it.

    Processes whose devices hold the same rows (those of one group of tensor parallelism, say) load the same part.

    Args:
      sharding: of an array [rows].

    Returns:
      process_index and process_count: of the parts, which are contiguous, equal and in order.

    Raises:
      UserError: the mesh gives this process rows that are no such part.
    """
    if jax.process_count() == 1:
        return {"process_index": 0, "process_count": 1}
    indices = sharding.addressable_devices_indices_map((rows,)).values()
    held = sorted({row for index in indices if index is not None for row in range(*index[0].indices(rows))})
    count, rest = divmod(rows, len(held))
    if rest or held[0] % len(held) or held[-1] - held[0] + 1 != len(held):
        raise UserError(
            f"process {jax.process_index()}: the mesh gives it rows {held[0]} to {held[-1]} of {rows}, but not all of "
            "them or no whole part; let data and fsdp, the outermost axes, follow the processes"
        )
    return {"process_index": held[0] // len(held), "process_count": count}


def place(
    batch: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding], rows: int | None = None
) -> dict[str, jax.Array]:
    """A batch on the devices, each array by its sharding. Every process passes the rows of `share_of_rows`.

    Args:
      rows: of the global batch; None where this process has all.
    """
    with jax.transfer_guard_host_to_device("allow"):  # this is the transfer that is meant
        return {name: _place(array, shardings[name], rows) for name, array in batch.items()}


def replicate(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, on all devices."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _place(array: np.ndarray, sharding: NamedSharding, rows: int | None) -> jax.Array:
    shape: Any = array.shape if rows is None else (rows, *array.shape[1:])
    return jax.make_array_from_process_local_data(sharding, array, shape)

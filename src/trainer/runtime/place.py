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
      process_index and process_count: of the parts, which are equal. A mesh follows the network of its devices, so a
      part's places in the batch need not lie side by side; each row carries its own index.

    Raises:
      UserError: the mesh gives processes parts that overlap, or of different lengths.
    """
    if jax.process_count() == 1:
        return {"process_index": 0, "process_count": 1}
    held: dict[int, set[int]] = {}
    indices: Mapping[Any, Any] = sharding.devices_indices_map((rows,))
    for device, index in indices.items():
        held.setdefault(device.process_index, set()).update(range(*index[0].indices(rows)))
    parts = sorted({tuple(sorted(part)) for part in held.values()})
    if sum(map(len, parts)) != rows or len({len(part) for part in parts}) > 1:
        raise UserError(
            f"the mesh gives the processes parts of the {rows} rows that overlap or are not equal; let data and fsdp, "
            "the outermost axes, follow the processes"
        )
    return {"process_index": parts.index(tuple(sorted(held[jax.process_index()]))), "process_count": len(parts)}


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

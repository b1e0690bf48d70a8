"""Transfers from host memory to devices."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from trainer.config.errors import UserError


def share_of_rows(sharding: NamedSharding, rows: int) -> dict[str, int]:
    """Returns which part of each batch this process loads, as a dict of keyword arguments for data streams.

    Processes whose devices need the same rows, for example in one tensor-parallel group, load the same part.

    Args:
      sharding: the sharding of an array [rows].
      rows: the number of rows of a batch.

    Returns:
      process_index and process_count: the index of this process's part, and the number of equally large parts. The rows
      of a part need not be contiguous in the batch, because the mesh orders the devices by the physical network. The
      batch field `row` contains each row's index.

    Raises:
      UserError: the parts that the mesh assigns to processes overlap or differ in size.
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
            f"the mesh assigns the processes parts of the {rows} rows that overlap or differ in size; choose sizes of "
            "data and fsdp, the outermost axes, such that process boundaries fall between their shards"
        )
    return {"process_index": parts.index(tuple(sorted(held[jax.process_index()]))), "process_count": len(parts)}


def place(
    batch: Mapping[str, np.ndarray], shardings: Mapping[str, NamedSharding], rows: int | None = None
) -> dict[str, jax.Array]:
    """Transfers arrays of a batch to the devices. Returns a dict from each name in `shardings` to the device array.

    Args:
      batch: the arrays by name, with this process's rows (see `share_of_rows`), or with all rows.
      rows: the number of rows of the global batch; None if `batch` contains all rows.
    """
    with jax.transfer_guard_host_to_device("allow"):  # this transfer is intended
        return {name: _place(batch[name], sharding, rows) for name, sharding in shardings.items()}


def replicate(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Replicates the array on all devices. Every process passes the same array."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _place(array: np.ndarray, sharding: NamedSharding, rows: int | None) -> jax.Array:
    shape: Any = array.shape if rows is None else (rows, *array.shape[1:])
    return jax.make_array_from_process_local_data(sharding, array, shape)

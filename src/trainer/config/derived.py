"""What follows from a resolved configuration by arithmetic."""

import math
from typing import Any

# The mesh axes, the outermost first, and the key that gives each its size.
MESH_AXES = {
    "data": "ici_data_parallelism",
    "fsdp": "ici_fsdp_parallelism",
    "tensor": "ici_tensor_parallelism",
}

# A key that is empty or 0 takes the value of another.
FOLLOWS = {"mu_dtype": "weight_dtype", "eval_per_device_batch_size": "per_device_batch_size"}


def mesh_axes(config: Any) -> dict[str, int]:
    """The sizes of the mesh axes, the outermost first."""
    return {axis: config[key] for axis, key in MESH_AXES.items()}


def microbatch_rows(config: Any) -> int:
    """Rows of one microbatch over all devices."""
    return round(config.per_device_batch_size * math.prod(mesh_axes(config).values()))


def global_batch_rows(config: Any) -> int:
    """Rows of one update over all devices."""
    return microbatch_rows(config) * config.gradient_accumulation_steps


def eval_batch_rows(config: Any) -> int:
    """Rows of one evaluation batch over all devices."""
    return round(config.eval_per_device_batch_size * math.prod(mesh_axes(config).values()))

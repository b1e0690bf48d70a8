"""Zero-1 (Rajbhandari et al. 2020, arXiv:1910.02054): shards the parameters and the optimizer state, which data
parallelism alone would replicate, over the mesh axis data.
"""

from collections.abc import Sequence
from math import prod

from jax.sharding import NamedSharding, PartitionSpec

from trainer.sharding import axes_of, entry

DATA = "data"
# The mesh axes of tensor parallelism. A dimension that they shard is not also sharded over data, because each device
# multiplies by its shard.
TENSOR_AXES = ("tensor", "tensor_sequence")


def over_data(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Returns `sharding` of an array of `shape`, with the mesh axis data added to the first suitable dimension.

    A dimension is suitable if tensor parallelism does not shard it and its size per device is a multiple of the size of
    the mesh axis data. If other axes already shard the dimension, data becomes its innermost axis. If no dimension is
    suitable, or if data already shards the array, `sharding` is returned unchanged.
    """
    sizes = sharding.mesh.shape
    data = sizes.get(DATA, 1)
    entries = [axes_of(found) for found in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    if data == 1 or any(DATA in axes for axes in entries):
        return sharding
    for i, (size, axes) in enumerate(zip(shape, entries, strict=True)):
        by_tensor = any(sizes[axis] > 1 for axis in axes if axis in TENSOR_AXES)
        if not by_tensor and size // prod(sizes[axis] for axis in axes) % data == 0:
            entries[i] = (*axes, DATA)
            return NamedSharding(sharding.mesh, PartitionSpec(*map(entry, entries)))
    return sharding

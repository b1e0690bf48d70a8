"""Zero-1 (Rajbhandari et al. 2020, arXiv:1910.02054): what data parallelism would replicate, split over its devices."""

from collections.abc import Sequence
from math import prod

from jax.sharding import NamedSharding, PartitionSpec

from trainer.sharding import axes_of, entry

DATA = "data"
# A dimension that these split stays as it is: its parts are what a device multiplies with.
TENSOR_AXES = ("tensor", "tensor_sequence")


def over_data(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """`sharding` of an array of `shape`, with the axis data added to the first dimension that it can split further.

    That is the first whose size on a device data divides and that tensor parallelism does not split; beside an axis
    that splits it already, data comes last. Where there is none, or data splits the array already, nothing changes.
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

"""The device properties that configuration checks need: number, platform, slices and CUDA compute capability.

JAX returns the capability of its default backend, which is wrong if a program is compiled for absent devices. These
functions read the properties from the devices of the mesh, which may be compile-only devices of a topology.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax


def hardware(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the keyword arguments of `config.resolve` that describe `devices`."""
    return {
        "device_count": len(devices),
        "platform": devices[0].platform,
        "num_slices": slice_count(devices),
        "capability": compute_capability(devices),
    }


def slice_count(devices: Sequence[jax.Device]) -> int | None:
    """Returns the number of slices of `devices`; None if the devices have no slices, as on CPU."""
    slices = {slice_of(device) for device in devices}
    return None if None in slices else len(slices)


def slice_of(device: Any) -> int | None:
    """Returns the index of a device's slice; None if the device has no slice, as on CPU.

    Each GPU host is one slice. JAX reports the slice index of present GPUs, but 0 for all compile-only GPUs, so for
    compile-only GPUs the index of the process is used.
    """
    return device.process_index if _is_absent_gpu(device) else getattr(device, "slice_index", None)


def memory_kinds(devices: Sequence[jax.Device]) -> list[str]:
    """Returns the kinds of memory that each of `devices` can address. JAX lists no memories for compile-only GPUs, so a
    constant list is returned for them."""
    if _is_absent_gpu(devices[0]):
        return ["device", "pinned_host"]
    return [memory.kind for memory in devices[0].addressable_memories()]


def _is_absent_gpu(device: Any) -> bool:
    client = getattr(device, "client", None)
    return getattr(client, "runtime_type", "") == "compile_only_runtime" and device.platform == "gpu"


def compute_capability(devices: Sequence[jax.Device]) -> tuple[int, int] | None:
    """Returns the lowest CUDA compute capability of `devices`, such as (9, 0) for an H200; None if a device has
    none."""
    found = [re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", ""))) for device in devices]
    known = [(int(match[1]), int(match[2])) for match in found if match]
    return min(known) if len(known) == len(found) else None

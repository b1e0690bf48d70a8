"""An early check, before tracing and allocation, whether a model can fit the devices."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from trainer.config import UserError, resolve
from trainer.config.sizes import least_bytes
from trainer.config.words import counted
from trainer.observe.text import si
from trainer.sharding import slice_count

# Files with a container's limit, in the two versions of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(config: Any, devices: Sequence[jax.Device], memory: float | None, margin: float = 1) -> None:
    """Compares a lower bound of training's memory (`least_bytes`) with the memory of the devices.

    It refuses what exceeds the memory by far; only compilation gives the exact memory of a step.

    Args:
      config: from `config.load`, not resolved.
      devices: the devices of the run.
      memory: bytes of each device; None if unknown: nothing is checked.
      margin: how many times that memory is accepted.

    Raises:
      UserError: it does not fit `devices`, or the configuration is not for them.
    """
    platform, count = devices[0].platform, len(devices)
    resolved = resolve(config, device_count=count, platform=platform, num_slices=slice_count(devices))
    needed = least_bytes(resolved) / count
    if memory is not None and needed > margin * memory:
        raise UserError(
            f"the model, its optimizer, a batch and its hidden states take at least {si(needed, 'B').strip()} on each "
            f"of {counted(count, 'device')} with {si(memory, 'B').strip()}: a smaller model or batch, or more devices"
        )


def device_memory(devices: Sequence[jax.Device]) -> float | None:
    """Bytes of one of `devices`; for CPU devices their share of this machine's memory. None if unknown."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    if not local:
        return None
    if local[0].platform == "cpu":
        return host_memory() / len(local)
    return (local[0].memory_stats() or {}).get("bytes_limit")


def memory_in_use(devices: Sequence[jax.Device]) -> int | None:
    """The most bytes that one of this process's `devices` has held so far; None if they do not say, as on a CPU."""
    stats = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
    return max((found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found), default=None)


def host_memory() -> int:
    """Bytes of this machine's memory, or of what its container may use."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found.append(int(text))
    return min(found)

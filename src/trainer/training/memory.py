"""Checks, before tracing and allocation, whether a model can fit into the memory of the devices."""

import os
from collections.abc import Sequence
from pathlib import Path

import jax

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.config.sizes import least_bytes
from trainer.config.words import counted
from trainer.observe.text import si
from trainer.sharding import hardware

# The files with a container's memory limit, for cgroup v2 and v1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_memory(config: Config, devices: Sequence[jax.Device], memory: float | None, margin: float = 1) -> None:
    """Compares a lower bound on the memory for training (`least_bytes`) with the memory of the devices.

    A configuration that passes may nevertheless need too much memory: the exact amount is known only after compilation.

    Args:
      config: from `config.load`, not resolved.
      devices: the devices of the run.
      memory: bytes of each device; None if unknown, in which case the memory is not checked.
      margin: the factor by which the bound may exceed the memory.

    Raises:
      UserError: the memory of `devices` is too small, or the configuration cannot be resolved for `devices`.
    """
    count = len(devices)
    needed = least_bytes(resolve(config, **hardware(devices))) / count
    if memory is not None and needed > margin * memory:
        raise UserError(
            f"the model, its optimizer, a batch and its hidden states need at least {si(needed, 'B').strip()} on each "
            f"of {counted(count, 'device')} with {si(memory, 'B').strip()}; use a smaller model or batch, or more "
            "devices"
        )


def device_memory(devices: Sequence[jax.Device]) -> float | None:
    """Returns the memory of one of `devices` in bytes (for a CPU device, its share of the host's memory); None if
    unknown."""
    local = _local(devices)
    return host_memory() / len(local) if local and local[0].platform == "cpu" else reported_memory(devices)


def reported_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that programs can use on one of `devices`; None if the device does not report them (CPU)."""
    stats = [device.memory_stats() or {} for device in _local(devices)[:1]]
    return stats[0].get("bytes_limit") if stats else None


def memory_in_use(devices: Sequence[jax.Device]) -> int | None:
    """Returns the peak number of bytes in use so far on any of this process's `devices`; None if not reported (CPU)."""
    stats = [device.memory_stats() or {} for device in _local(devices)]
    return max((found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found), default=None)


def _local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    return [device for device in devices if device.process_index == jax.process_index()]


def host_memory() -> int:
    """Returns the memory of this machine in bytes, or the limit of its container if that is smaller."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _LIMITS):
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            found.append(int(text))
    return min(found)

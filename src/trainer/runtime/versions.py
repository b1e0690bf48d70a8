"""The installed versions of what a compiled step depends on."""

import functools
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from trainer.config.words import visible

# The packages that write a step's program, and the one that compiles it.
PACKAGES = ("jax", "jaxlib", "flax", "optax")


@functools.cache
def installed() -> Mapping[str, str]:
    """Returns the version of each of `PACKAGES`."""
    return {name: metadata.version(name) for name in PACKAGES}


def other_versions(before: Mapping[str, str]) -> str:
    """Returns a line if a checkpoint saved with the versions `before` resumes with others; "" if not, or if unknown."""
    now = installed()
    changed = [name for name in now if name in before and before[name] != now[name]]
    changes = ", ".join(f"{name} {visible(before[name], keep='')} -> {now[name]}" for name in changed)
    return changes and f"losses may differ in the last bits, because versions changed: {changes}"


def machine() -> dict[str, str]:
    """Returns what the bits of a result depend on besides the program: versions, processor, XLA's flags."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "Python": platform.python_version(),
        **installed(),
        "numpy": metadata.version("numpy"),
        "processor": model or platform.machine(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }

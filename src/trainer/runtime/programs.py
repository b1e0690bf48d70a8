"""Prevents loading compiled programs for several CPU devices (docs/decisions/0033-loaded-programs.md).

XLA may mix up the data of the devices in a program that it has loaded from a file instead of compiling it.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def compile_anew(devices: Sequence[jax.Device]) -> None:
    """Disables a configured JAX compilation cache, with a message, if `devices` are several CPU devices."""
    enabled, folder = "jax_enable_compilation_cache", "jax_compilation_cache_dir"  # missing in JAX's type stubs
    used = getattr(jax.config, enabled) and getattr(jax.config, folder)
    if not used or len(devices) == 1 or devices[0].platform != "cpu":
        return
    jax.config.update(enabled, False)
    compilation_cache.reset_cache()  # needed because JAX reads the option only once
    if jax.process_index() == 0:
        print(
            "JAX_COMPILATION_CACHE_DIR is not used: XLA mixes up the devices' data in programs for several CPU devices "
            "that it reads from a cache",
            file=sys.stderr,
        )


def is_mixed_up(compiled: Any, kind: str, number: int) -> bool:
    """Returns whether XLA may mix up the devices' data if it loads the program `compiled` from a file.

    `kind`, `number`: the platform and the number of the program's devices.
    """
    return kind == "cpu" and number > 1 and " collective-permute(" in compiled.as_text()

"""Which compiled programs may be loaded: not those of several CPU devices (docs/decisions/0033-loaded-programs.md)."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def compile_anew(devices: Sequence[jax.Device]) -> None:
    """Disables JAX's compilation cache if programs run on several CPU devices. Reports it if the user has set one."""
    enabled, folder = "jax_enable_compilation_cache", "jax_compilation_cache_dir"  # missing in the stubs
    used = getattr(jax.config, enabled) and getattr(jax.config, folder)
    if not used or len(devices) == 1 or devices[0].platform != "cpu":
        return
    jax.config.update(enabled, False)
    compilation_cache.reset_cache()  # needed because JAX reads the option only once
    if jax.process_index() == 0:
        print(
            "JAX_COMPILATION_CACHE_DIR is not used: XLA mixes up the data of devices in programs of several CPU "
            "devices that it reads from a cache",
            file=sys.stderr,
        )


def is_mixed_up(compiled: Any, kind: str, number: int) -> bool:
    """Returns whether XLA may mix up the devices' data if it loads the program `compiled` from a file. `kind`,
    `number`: the kind and number of the program's devices."""
    return kind == "cpu" and number > 1 and " collective-permute(" in compiled.as_text()

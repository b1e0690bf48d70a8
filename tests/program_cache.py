"""Tests that compile the same programs again and again take them from a cache, in this process and in others."""

import contextlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def cached_programs(folder):
    """Compiled programs are kept in `folder`."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

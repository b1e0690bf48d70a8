"""The suite runs on eight simulated CPU devices, whatever the machine has. Set before anything imports JAX.

Both workers and every process that a test starts share one cache of compiled programs, which ends with the suite: a
program whose text is the same in several combinations, runs or processes is compiled once.
"""

import os
import shutil
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

pytest_plugins = ["checkout", "pins"]  # in this order: pins imports the package


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker of xdist inherits the environment of the process that started it
    folder = tempfile.mkdtemp(prefix="trainer-tests-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))

"""Runs the suite on eight simulated CPU devices, on any machine.

They are set up before anything imports JAX. compiler.py defines how programs are compiled. The workers and every
process that a test starts share one compilation cache, so a single-device program whose text is the same in several
combinations, runs or processes is compiled once. The cache is JAX_COMPILATION_CACHE_DIR or, if that is unset, a folder
that is deleted when the suite ends.
"""

import atexit
import gc
import os
import shutil
import tempfile

from compiler import start_xla
from ml_collections import ConfigDict

os.environ["JAX_PLATFORMS"] = "cpu"
# Recording source lines takes a quarter of the lowering time, and no test reads them.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# Tracing makes many small objects and few cycles. At Python's threshold of 700 objects, garbage collection takes up to
# a tenth of the time.
gc.set_threshold(50_000, 20, 50)

_OF_EVERY_OBJECT = frozenset(dir(super(ConfigDict, ConfigDict())))


def _ensure_mutability(self: ConfigDict, name: str) -> None:
    """Refuses the same names as ConfigDict. ConfigDict lists them anew for each of 370 keys, which takes half of
    `load`."""
    if name in _OF_EVERY_OBJECT:
        raise KeyError(f"{name} cannot be overridden.")


ConfigDict._ensure_mutability = _ensure_mutability

pytest_plugins = ["checkout", "pins", "whole", "programs", "again"]  # in this order: the last three import the package

# This is not in a hook: before any hook runs, pytest imports the conftest.py of a folder named on the command line, and
# with it JAX. A worker of xdist inherits the environment of the process that started it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="trainer-tests-programs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

start_xla(8)


def pytest_configure() -> None:
    from trainer.sharding import mesh

    mesh.compile_anew = lambda devices: None  # compiler.py does this for each program

"""The suite runs on eight simulated CPU devices on any machine. They are set up before anything imports JAX.

compiler.py defines how programs are compiled. Both workers and every process that a test starts share one compilation
cache, so a program of one device whose text is the same in several combinations, runs or processes is compiled once.
The cache is JAX_COMPILATION_CACHE_DIR, or a folder that is deleted when the suite ends.
"""

import atexit
import gc
import os
import shutil
import tempfile

from compiler import start_xla
from ml_collections import ConfigDict, FrozenConfigDict

os.environ["JAX_PLATFORMS"] = "cpu"
# Source lines in programs take a quarter of the lowering time, and no test reads them.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# Tracing makes many small objects and few cycles. At Python's threshold of 700 objects, garbage collection takes up to
# a tenth of the time.
gc.set_threshold(50_000, 20, 50)


def _equal(self: FrozenConfigDict, other: object) -> bool:
    """Compares like FrozenConfigDict, but without its copies of both sides, which take 5 ms.

    JAX looks a trace up by comparing the model's configuration with every configuration that the process has traced.
    """
    return self is other or (isinstance(other, FrozenConfigDict) and self.as_configdict() == other.as_configdict())


FrozenConfigDict.__eq__ = _equal
_METHODS = frozenset(dir(object))


def _ensure_mutability(self: ConfigDict, attribute: str) -> None:
    """Checks like ConfigDict, but without listing the same names for each key, half the time of a configuration."""
    if attribute in _METHODS:
        raise KeyError(f"{attribute} cannot be overridden.")


ConfigDict._ensure_mutability = _ensure_mutability

pytest_plugins = ["checkout", "pins", "whole"]  # in this order: pins and whole import the package

# This is here and not in a hook: pytest imports the conftest.py of a folder named on the command line, and with it JAX,
# before any hook runs. A worker of xdist inherits the environment of the process that started it.
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

"""Versions and other properties of the software and machine, which affect the results of a run."""

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import trainer
from trainer.config.words import visible

# The packages that create a step's program, and jaxlib, which compiles it.
PACKAGES = ("jax", "jaxlib", "flax", "optax")


@functools.cache
def installed() -> Mapping[str, str]:
    """Returns the version of each of `PACKAGES`."""
    return {name: metadata.version(name) for name in PACKAGES}


def other_versions(before: Mapping[str, str]) -> str:
    """Returns a warning if installed versions differ from those of a checkpoint (`before`); otherwise ""."""
    now = installed()
    changed = [name for name in now if name in before and before[name] != now[name]]
    changes = ", ".join(f"{name} {visible(before[name], keep='')} -> {now[name]}" for name in changed)
    return changes and f"losses may differ in the last bits, because versions changed: {changes}"


def program() -> dict[str, str]:
    """Returns the properties of the installation that must be equal in all processes of a run, for `check_same`.

    The result is a dict from a title to a text with one property per line. The properties are the versions of packages,
    of Python and of the devices' compiler, and the digests of the trainer's source files, including its presets and
    templates. Bytecode and the kind of installation make no difference, because the source files themselves are read.
    """
    import jax

    root = Path(trainer.__file__).parent
    files = sorted(path for ending in ("py", "yml", "html") for path in root.rglob(f"*.{ending}"))
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}
    versions = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{name: metadata.version(name) for name in (*PACKAGES, "orbax-checkpoint", "numpy")},
        "compiler": " ".join(jax.devices()[0].client.platform_version.split()),
    }
    return {
        "the versions": "\n".join(f"{name} {version}" for name, version in versions.items()),
        "the source of trainer": "\n".join(
            f"{path.relative_to(root).as_posix()} {digest}" for path, digest in digests.items()
        ),
    }


def machine() -> dict[str, str]:
    """Returns the properties outside of our code that affect the bits of a run's results: versions, processor, XLA's
    flags."""
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

"""Environment variables that JAX and libtpu read when they are loaded: set before anything imports JAX."""

import importlib.util
import os
from importlib import metadata
from pathlib import Path

# JAX's name of a platform, the modules of its plugin, and a device file that is there where such hardware is.
_GPUS = (
    ("cuda", ("jax_cuda12_plugin", "jax_cuda13_plugin"), "/dev/nvidiactl"),
    ("rocm", ("jax_rocm60_plugin", "jax_rocm7_plugin"), "/dev/kfd"),
)


def leave_out_absent_tpu() -> None:
    """Keeps JAX from starting libtpu on a machine without a TPU, where the package is for ahead-of-time compilation.

    JAX starts every platform whose library is installed. Without a TPU libtpu then prints warnings, and holds a lock
    file on which a second process stops. Nothing is changed if JAX_PLATFORMS is set, if there is a TPU, or if a plugin
    is installed whose name is not known here.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None or _has_tpu():
        return
    plugins = {entry.name for entry in metadata.entry_points(group="jax_plugins")}
    known = {module.removesuffix("_plugin").removeprefix("jax_") for _, modules, _ in _GPUS for module in modules}
    if any(plugin.removeprefix("jax_").removesuffix("_plugin") not in known for plugin in plugins):
        return
    gpus = [
        name
        for name, modules, device in _GPUS
        if Path(device).exists() and any(importlib.util.find_spec(module) for module in modules)
    ]
    os.environ["JAX_PLATFORMS"] = ",".join([*gpus, "cpu"])


def prepare_compile_only_tpu() -> None:
    """Lets libtpu compile without a TPU, beside other processes that do so, and without its warnings.

    Call it before libtpu is loaded. The variables describe a machine that is not asked for anything.
    """
    for name, value in (
        ("JAX_PLATFORMS", "cpu"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
    ):
        os.environ.setdefault(name, value)


def _has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))

"""Sets environment variables that JAX and libtpu read when they are loaded. Use this module before importing JAX."""

import importlib.util
import os
import pkgutil
import re
from importlib import metadata
from pathlib import Path

from trainer.config.topologies import Topology, find_topology

# Prefix of a JAX plugin's name -> (JAX's platform name, device files). At least one of the files exists if the hardware
# is present. /dev/dxg exists on WSL.
_GPUS = {"xla_cuda": ("cuda", ("/dev/nvidiactl", "/dev/dxg")), "xla_rocm": ("rocm", ("/dev/kfd",))}

_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_THREADS_PER_DEVICE = 4


def leave_out_absent_tpu() -> None:
    """Prevents JAX from starting libtpu without a TPU, or a GPU plugin without a GPU.

    Such packages may be installed for ahead-of-time compilation only, but JAX starts every installed platform. Without
    a TPU, libtpu then prints warnings and holds a lock file that makes a second process fail; without a GPU, a plugin
    prints a traceback. This function changes nothing if JAX_PLATFORMS is set, if there is a TPU, or if an unknown
    plugin is installed.
    """
    if os.environ.get("JAX_PLATFORMS") or has_tpu():
        return
    present: list[str] = []
    absent = ["tpu"] if importlib.util.find_spec("libtpu") else []
    for plugin in _plugins():
        gpu_platform = next((gpu for prefix, gpu in _GPUS.items() if plugin.startswith(prefix)), None)
        if gpu_platform is None:
            return
        platform, files = gpu_platform
        (present if any(Path(file).exists() for file in files) else absent).append(platform)
    if absent:
        os.environ["JAX_PLATFORMS"] = ",".join([*present, "cpu"])


def prepare_compile_only_tpu() -> None:
    """Sets environment variables so that libtpu can compile without a TPU, in several processes, and without warnings.

    Call it before libtpu is loaded. The variables describe a placeholder TPU machine.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # overrides the user's value: nothing runs on a TPU
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
    ):
        os.environ.setdefault(name, value)


def prepare_to_compile(topology: str) -> None:
    """Prepares this process for compiling for the devices that compile_topology names."""
    prepare_compile_only_tpu()
    known = find_topology(topology)
    if isinstance(known, Topology) and known.platform == "cpu":
        simulate_cpu_devices(known.devices)


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX simulate `count` devices on the CPU. Keeps the other flags in XLA_FLAGS, and overrides an earlier
    device count."""
    flag = f"--xla_force_host_platform_device_count={count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()  # the last flag wins


def add_threads_for_simulated_devices() -> None:
    """Gives XLA several threads per simulated device, so that the devices' collectives cannot block each other forever.

    A device that waits in a collective blocks a thread, and on a small machine XLA has one thread per device. XLA may
    run a collective in a branch of a conditional at the same time as one outside of the branch. One device can then
    block two threads, so that another device, for which both collectives wait, gets no thread. XLA reads the number of
    threads from the environment variable NPROC; a value set by the user is kept. See docs/decisions/0019-threads.md.
    """
    if counts := _SIMULATED.findall(os.environ.get("XLA_FLAGS", "")):
        os.environ.setdefault("NPROC", str(max(_THREADS_PER_DEVICE * int(counts[-1]), os.cpu_count() or 1)))


def _plugins() -> set[str]:
    """Returns the names of the installed JAX plugins, discovered in the same way as by JAX."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    entries = metadata.entry_points(group="jax_plugins")
    return {module.name for module in pkgutil.iter_modules(folders)} | {entry.name for entry in entries}


def has_tpu() -> bool:
    """Returns whether the machine has a TPU, that is, a device file /dev/accelN or /dev/vfio/N, as on Cloud TPU VMs."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))

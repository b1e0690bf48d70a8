"""Describes NVIDIA GPUs to XLA's compiler, and checks for the software needed to compile for absent GPUs."""

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jax.errors import JaxRuntimeError

from trainer.aot.chips import Chip
from trainer.config.errors import UserError

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_ABSENT = re.compile(r"(cuDNN|libdevice) not found|(?:[Cc]ouldn't|[Cc]annot|[Ff]ailed to) find [^.]*?(ptxas|nvlink)")


@dataclass(frozen=True)
class Target:
    """A GPU that XLA compiles for. The values are from XLA's xla/backends/gpu/target_config/specs (openxla/xla, read
    on 2026-11-29), except the H200's bandwidth and cache size, which its driver reported. `bandwidth` is for the
    compiler's cost model, as XLA describes the GPU; estimates of time use the data sheet's figure in `chips.CHIPS`."""

    capability: int  # major version of the CUDA compute capability
    cores: int
    fpus: int  # per core
    shared: int  # shared memory per core in bytes
    bandwidth: int  # bandwidth of the GPU's memory in bytes per second
    cache: int  # L2 cache in bytes
    clock: float  # GHz

    def text(self, chip: Chip) -> str:
        """Returns the GPU's description as a GpuTargetConfig of XLA, in protobuf text format."""
        feature = "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared} shared_memory_per_block_optin: {self.shared - 1024}
  threads_per_core_limit: 2048 core_count: {self.cores} fpus_per_core: {self.fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache} clock_rate_ghz: {self.clock}
  device_memory_size: {chip.hbm_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {self.capability} minor: 0 feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{chip.kinds[0]}"
"""


TARGETS = {
    "a100": Target(8, cores=108, fpus=64, shared=167936, bandwidth=2039040000000, cache=41943040, clock=1.41),
    "h100": Target(9, cores=132, fpus=128, shared=233472, bandwidth=3352320000000, cache=52428800, clock=1.98),
    "h200": Target(9, cores=132, fpus=128, shared=233472, bandwidth=4917248000000, cache=62914560, clock=1.98),
    "b200": Target(10, cores=148, fpus=128, shared=233472, bandwidth=7672320000000, cache=132644864, clock=1.965),
}


def plugin() -> str | None:
    """Returns the module of JAX's CUDA plugin; None if it is not installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in _PLUGINS if importlib.util.find_spec(name)), None)


@contextlib.contextmanager
def parts_present() -> Iterator[None]:
    """Wraps a compilation: raises UserError if NVIDIA software that the compiler needs is not installed."""
    try:
        yield
    except JaxRuntimeError as error:
        if not (match := _ABSENT.search(str(error))):
            raise
        cuda = (plugin() or _PLUGINS[0])[-2:]
        packages = f"nvidia-cuda-nvcc{'-cu12' if cuda == '12' else ''} nvidia-cudnn-cu{cuda}"
        reason = str(error).partition("\n")[0]
        part = match[1] or match[2]
        raise UserError(f"the GPU compiler cannot find {part}: pip install {packages} ({reason})") from None

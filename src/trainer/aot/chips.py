"""Tables of the memory, bandwidths and peak FLOP/s of TPUs and GPUs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.errors import UserError

GIB = 1024**3
# The environment variables that set the fraction of a GPU's memory that JAX's allocator takes; the last is deprecated.
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclass(frozen=True)
class Chip:
    """Published peak figures, per chip unless stated otherwise.

    Attributes:
      name: the chip's key in `CHIPS`.
      kinds: the values that `device_kind` has for the chip's JAX devices.
      devices: JAX devices per chip. v4 and v5p present their two cores as one device, tpu7x as two devices.
      hbm_bytes: HBM of one device that is available to the compiler, slightly less than the physical size.
      pool: whether JAX's allocator takes only a fraction of `hbm_bytes`, as on GPUs.
      hbm_bandwidth: bytes per second between HBM and the cores.
      peak: FLOP/s of matrix products by the operands' dtype, in HLO's spelling. At JAX's default precision, float32
        operands run at the bfloat16 rate on TPUs, which round them to bfloat16, and at the TF32 rate on GPUs.
      ici_bandwidth: bytes per second that a chip sends over all of its links within a slice; for GPUs, over NVLink.
      torus: the number of dimensions of the network within a slice, each with links in both directions; 1 for a switch.
      dcn_bandwidth: bytes per second that a chip sends to other slices, its share of the host's network bandwidth.
      host_bandwidth: bytes per second between a chip's HBM and its host's memory, in one direction.
    """

    name: str
    kinds: tuple[str, ...]
    devices: int
    hbm_bytes: int
    hbm_bandwidth: float
    peak: Mapping[str, float]
    ici_bandwidth: float
    torus: int
    dcn_bandwidth: float
    host_bandwidth: float
    pool: bool = False

    def flops(self, dtype: str) -> float:
        """Returns the peak FLOP/s of one device for operands of `dtype`, or bfloat16's if `peak` lacks `dtype`."""
        return self.peak.get(dtype, self.peak["bf16"]) / self.devices

    @property
    def usable(self) -> int:
        """Bytes of one device's memory that a program can use."""
        return int(self.hbm_bytes * memory_fraction()) if self.pool else self.hbm_bytes


def fraction_variable() -> str:
    """Returns the name in `FRACTIONS` that is set; the first one if none is.

    Raises:
      UserError: both are set, which jaxlib refuses.
    """
    given = [name for name in FRACTIONS if os.environ.get(name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are both set: unset {given[1]}, which is deprecated")
    return given[0] if given else FRACTIONS[0]


def memory_fraction() -> float:
    """Returns the fraction of a GPU's memory that JAX's allocator takes.

    Raises:
      UserError: the value is not a number above 0 and at most 1, or both variables of `FRACTIONS` are set.
    """
    name = fraction_variable()
    given = os.environ.get(name, "")
    try:
        fraction = float(given or 0.75)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UserError(f"{name}={given}: not a number above 0 and at most 1")
    return fraction


# Sources, read on 2026-11-21: the specification tables of https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e
# and /tpu7x; an ICI bandwidth given for both directions is halved. hbm_bytes is the "available HBM" that libtpu 0.0.51
# reports when a program does not fit. Those pages do not have these figures:
# - ICI and DCN bandwidth of v4: from https://jax-ml.github.io/scaling-book/tpus, and for ICI the 2400 Gbit/s of the v4
#   paper (Jouppi et al. 2023, arXiv:2304.01433).
# - DCN bandwidth of v5e and v6e: that of the host's network cards, 2 x 100 Gbit/s for v5e and 4 x 200 Gbit/s for v6e,
#   divided by the host's 8 chips.
# - host_bandwidth: the bandwidth of PCIe, from https://jax-ml.github.io/scaling-book/tpus, read on 2026-11-30: 16 GB/s
#   each way on v4, "typically around 1.6e10 bytes / second per TPU (3.2e10 for TPU v6e)". No figure is published for
#   tpu7x; v6e's is assumed.
_TPUS = (
    Chip(
        name="v4",
        kinds=("TPU v4",),
        devices=1,
        hbm_bytes=int(31.75 * GIB),
        hbm_bandwidth=1.2e12,
        peak={"bf16": 275e12, "s8": 275e12},
        ici_bandwidth=300e9,
        torus=3,
        dcn_bandwidth=6.25e9,
        host_bandwidth=16e9,
    ),
    Chip(
        name="v5e",
        kinds=("TPU v5 lite", "TPU v5e"),
        devices=1,
        hbm_bytes=int(15.75 * GIB),
        hbm_bandwidth=819e9,
        peak={"bf16": 197e12, "s8": 393e12},
        ici_bandwidth=200e9,
        torus=2,
        dcn_bandwidth=3.125e9,
        host_bandwidth=16e9,
    ),
    Chip(
        name="v5p",
        kinds=("TPU v5", "TPU v5p"),
        devices=1,
        hbm_bytes=int(95.73 * GIB),
        hbm_bandwidth=2.765e12,
        peak={"bf16": 459e12, "s8": 918e12},
        ici_bandwidth=600e9,
        torus=3,
        dcn_bandwidth=6.25e9,
        host_bandwidth=16e9,
    ),
    Chip(
        name="v6e",
        kinds=("TPU v6 lite", "TPU v6e"),
        devices=1,
        hbm_bytes=int(31.24 * GIB),
        hbm_bandwidth=1.638e12,
        peak={"bf16": 918e12, "s8": 1836e12},
        ici_bandwidth=400e9,
        torus=2,
        dcn_bandwidth=12.5e9,
        host_bandwidth=32e9,
    ),
    Chip(
        name="tpu7x",
        kinds=("TPU7x",),
        devices=2,
        hbm_bytes=int(94.74 * GIB),
        hbm_bandwidth=7.38e12,
        peak={"bf16": 2307e12, "f8e4m3fn": 4614e12, "f8e5m2": 4614e12},
        ici_bandwidth=600e9,
        torus=3,
        dcn_bandwidth=12.5e9,
        host_bandwidth=32e9,
    ),
)
# Sources, read on 2026-11-29. hbm_bytes: device_memory_size in XLA's files xla/backends/gpu/target_config/specs
# (openxla/xla); for the H200, the size that its driver reported. Peaks are without sparsity: half of a data sheet's
# figure with sparsity. ici_bandwidth is NVLink's in one direction: half of a data sheet's figure. dcn_bandwidth is that
# of one network card per GPU. host_bandwidth is that of 16 lanes of PCIe in one direction, after encoding (128 of 130
# bits). The A100 has PCIe of generation 4 (16 GT/s), the H100 and the H200 have generation 5 (32 GT/s), as in their
# data sheets (64 and 128 GB/s in both directions together). For the B200 we assume generation 5, which the processors
# of DGX B200 have.
# - a100: NVIDIA A100 80GB data sheet (SXM: 2,039 GB/s; NVLink 600 GB/s); DGX A100 data sheet: 8 x 200 Gbit/s.
# - h100: NVIDIA H100 data sheet (SXM5: 3.35 TB/s; NVLink 900 GB/s); DGX H100 data sheet: 8 x 400 Gbit/s.
# - h200: NVIDIA H200 data sheet (SXM: 4.8 TB/s; NVLink 900 GB/s); DGX H200 data sheet: 8 x 400 Gbit/s.
# - b200: an eighth of the NVIDIA DGX B200 data sheet: 72 PFLOP/s of FP8 with sparsity, 64 TB/s, NVLink 14.4 TB/s,
#   8 x 400 Gbit/s. The other peaks are from the HGX platform's page: 36 PFLOP/s of BF16, 18 of TF32, with sparsity. For
#   int8 we assume the peak of FP8, as on the H100; a copy of NVIDIA's Blackwell data sheet (9 POP/s of INT8 with
#   sparsity, read on 2026-11-30) agrees.
_NARROW = ("f8e4m3fn", "f8e5m2")
_HOPPER = {"bf16": 989e12, "f16": 989e12, "f32": 494.5e12, "s8": 1979e12} | dict.fromkeys(_NARROW, 1979e12)
_GPUS = (
    Chip(
        name="a100",
        kinds=("NVIDIA A100-SXM4-80GB",),
        devices=1,
        hbm_bytes=85100068864,
        hbm_bandwidth=2.039e12,
        peak={"bf16": 312e12, "f16": 312e12, "f32": 156e12, "s8": 624e12},
        ici_bandwidth=300e9,
        torus=1,
        dcn_bandwidth=25e9,
        host_bandwidth=31.5e9,
        pool=True,
    ),
    Chip(
        name="h100",
        kinds=("NVIDIA H100 80GB HBM3",),
        devices=1,
        hbm_bytes=84942979072,
        hbm_bandwidth=3.35e12,
        peak=_HOPPER,
        ici_bandwidth=450e9,
        torus=1,
        dcn_bandwidth=50e9,
        host_bandwidth=63e9,
        pool=True,
    ),
    Chip(
        name="h200",
        kinds=("NVIDIA H200",),
        devices=1,
        hbm_bytes=150123577344,
        hbm_bandwidth=4.8e12,
        peak=_HOPPER,
        ici_bandwidth=450e9,
        torus=1,
        dcn_bandwidth=50e9,
        host_bandwidth=63e9,
        pool=True,
    ),
    Chip(
        name="b200",
        kinds=("NVIDIA B200",),
        devices=1,
        hbm_bytes=191514411008,
        hbm_bandwidth=8e12,
        peak={"bf16": 2250e12, "f16": 2250e12, "f32": 1125e12, "s8": 4500e12} | dict.fromkeys(_NARROW, 4500e12),
        ici_bandwidth=900e9,
        torus=1,
        dcn_bandwidth=50e9,
        host_bandwidth=63e9,
        pool=True,
    ),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in (*_TPUS, *_GPUS)}


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip of a JAX device (`device.device_kind`), or None if the table lacks it, as for a CPU."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)

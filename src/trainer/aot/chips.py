"""A table of chips."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class Chip:
    """Published peak figures, per chip unless stated otherwise.

    Attributes:
      name: the table's key.
      kinds: `device_kind` of its JAX devices.
      devices: JAX devices per chip. v4 and v5p present their two cores as one device, tpu7x as two.
      hbm_bytes: HBM of one device that is available to the compiler, slightly less than the physical size.
      hbm_bandwidth: bytes per second between HBM and the cores.
      peak: FLOP/s of matrix products by the operands' dtype, in HLO's spelling. float32 operands run at bfloat16's
        rate, because a TPU rounds them to bfloat16 at JAX's default precision.
      ici_bandwidth: bytes per second that a chip sends over all of its links within a slice.
      torus: the number of dimensions of the network within a slice, each with links in both directions.
      dcn_bandwidth: bytes per second that a chip sends to other slices: its share of the host's network.
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

    def flops(self, dtype: str) -> float:
        """Returns the peak FLOP/s of one device for operands of `dtype`; bfloat16's if the table lacks `dtype`."""
        return self.peak.get(dtype, self.peak["bf16"]) / self.devices


# Sources, read on 2026-11-21: the specification tables of https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e
# and /tpu7x; an ICI bandwidth given for both directions is halved. hbm_bytes is what libtpu 0.0.51 reports as
# "available HBM" when a program does not fit. Not in those pages:
# - v4: ICI and DCN from https://jax-ml.github.io/scaling-book/tpus, with the 2400 Gbit/s of the v4 paper
#   (Jouppi et al. 2023, arXiv:2304.01433).
# - v5e, v6e: DCN is the host's network cards, 2 x 100 and 4 x 200 Gbit/s, shared by its 8 chips.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
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
        ),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip of a JAX device (`device.device_kind`), or None if it is not in the table, such as a CPU."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)

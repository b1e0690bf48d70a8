"""A table of chips, and how long a step would take on one: a roofline, which is a lower bound and no promise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.aot.collectives import Collective, moved
from trainer.aot.cost import Cost

GIB = 1024**3


@dataclass(frozen=True)
class Chip:
    """What a chip can do at most, as published; per chip unless it says otherwise.

    Attributes:
      name: the table's key.
      kinds: `device_kind` of its JAX devices.
      devices: JAX devices in a chip. v4 and v5p join their two cores into one device, tpu7x shows two.
      hbm_bytes: of main memory on one device, as much as the compiler hands out, a little less than is built in.
      hbm_bandwidth: bytes per second between main memory and the cores.
      peak: FLOP/s of matrix products by the operands' dtype in HLO's spelling. float32 operands have bfloat16's: at
        JAX's default precision a TPU rounds them to it.
      ici_bandwidth: bytes per second that leave a chip through all of its links within a slice.
      torus: dimensions of the network within a slice, each with a link in both directions.
      dcn_bandwidth: bytes per second that leave a chip for another slice, a chip's share of its host's network.
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
        """Peak FLOP/s of one device for operands of `dtype`; a dtype that is not in the table has bfloat16's."""
        return self.peak.get(dtype, self.peak["bf16"]) / self.devices


# Sources, read on 2026-11-21: https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x, their tables of
# specifications; an ICI bandwidth that is given for both directions is halved. hbm_bytes is what libtpu 0.0.51 calls
# "available HBM" when a program does not fit. What those pages do not say:
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
    """The chip of a JAX device (`device.device_kind`), or None for one that is not in the table, a CPU for instance."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)


class Estimate(NamedTuple):
    """Seconds of a step on one device.

    Attributes:
      seconds: the largest of the parts, as if they overlapped perfectly. No program is faster than that.
      serial_seconds: their sum, as if nothing overlapped.
      compute_seconds: matrix products at the peak for their dtype.
      memory_seconds: bytes in main memory at its bandwidth.
      network_seconds: the slower of the next two.
      ici_seconds: collectives within a slice, one after the other.
      dcn_seconds: between slices.
      bound: the largest part, "compute", "memory" or "network".
    """

    seconds: float
    serial_seconds: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    ici_seconds: float
    dcn_seconds: float
    bound: str


def estimate(cost: Cost, chip: Chip, devices: int, slices: int = 1) -> Estimate:
    """The time of a step by a roofline.

    Assumptions: every part runs at its peak; elementwise operations cost memory traffic only; a collective goes around
    rings in both directions of one dimension of the torus, or of all of them if it takes all devices of a slice; rings
    close (small slices are meshes without the closing links, and half as fast); collectives share no links; latencies
    are zero. A collective over several slices is done within each first, so that every device sends its share.

    Args:
      cost: what `aot.cost.analyze` counted, per device.
      chip: of the devices.
      devices: of the whole mesh.
      slices: that they are spread over.
    """
    compute = sum(flops / chip.flops(dtype) for dtype, flops in cost.matmul_flops.items())
    memory = cost.hbm_bytes / (chip.hbm_bandwidth / chip.devices)
    ici = dcn = 0.0
    for collective in cost.collectives:
        inside, between = _bytes(collective)
        whole_slice = collective.devices // collective.slices >= devices // slices
        ici += inside / (chip.ici_bandwidth / chip.devices / (1 if whole_slice else chip.torus))
        dcn += between / (chip.dcn_bandwidth / chip.devices)
    network = max(ici, dcn)
    seconds, bound = max((compute, "compute"), (memory, "memory"), (network, "network"))
    return Estimate(seconds, compute + memory + ici + dcn, compute, memory, network, ici, dcn, bound)


def _bytes(collective: Collective) -> tuple[float, float]:
    """Bytes that leave a device in a step within its slice, and those for another slice."""
    kind, slices = collective.kind, collective.slices
    if slices == 1:
        return collective.bytes, 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return 0.0, collective.bytes
    inside = collective.devices // slices
    share = collective.size // inside
    within = moved(kind, collective.size, inside) if inside > 1 else 0.0
    return collective.count * within, collective.count * moved(kind, share, slices)

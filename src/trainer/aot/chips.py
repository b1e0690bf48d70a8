"""A table of chips, and a roofline estimate of a step's time on a chip: a lower bound, not a prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.aot.collectives import Collective, moved
from trainer.aot.cost import Cost

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


class Estimate(NamedTuple):
    """Seconds of a step on one device.

    Attributes:
      seconds: the largest part, as if all parts overlapped perfectly: a lower bound.
      serial_seconds: the sum of the parts, as if nothing overlapped.
      compute_seconds: time of matrix products at the peak for their dtype.
      memory_seconds: time of HBM traffic at its bandwidth.
      network_seconds: the larger of the next two.
      ici_seconds: time of collectives within a slice, in sequence.
      dcn_seconds: time of collectives between slices, in sequence.
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
    """Returns the roofline estimate of a step's time.

    Assumptions: every part runs at its peak; elementwise operations cost memory traffic only; a collective uses rings
    in both directions of one dimension of the torus, or of all dimensions if it spans all devices of a slice; rings are
    closed (small slices lack the wraparound links and are half as fast); collectives share no links; latencies are
    zero. Collectives that are not in every step are left out. A collective over several slices runs within each slice
    first, so that every device sends its share.

    Args:
      cost: from `aot.cost.analyze`, per device.
      chip: the chip of the devices.
      devices: the number of devices in the mesh.
      slices: the number of slices in the mesh.

    Raises:
      ValueError: the trip count of a loop is unknown.
    """
    if cost.unknown_loops:
        raise ValueError(f"no estimate: loops of unknown trip count: {', '.join(cost.unknown_loops)}")
    compute = sum(flops / chip.flops(dtype) for dtype, flops in cost.matmul_flops.items())
    memory = cost.hbm_bytes / (chip.hbm_bandwidth / chip.devices)
    ici = dcn = 0.0
    for collective in cost.collectives:
        if collective.conditional:
            continue
        inside, between = _bytes(collective)
        whole_slice = collective.devices // collective.slices >= devices // slices
        ici += inside / (chip.ici_bandwidth / chip.devices / (1 if whole_slice else chip.torus))
        dcn += between / (chip.dcn_bandwidth / chip.devices)
    network = max(ici, dcn)
    seconds, bound = max((compute, "compute"), (memory, "memory"), (network, "network"))
    return Estimate(seconds, compute + memory + ici + dcn, compute, memory, network, ici, dcn, bound)


def _bytes(collective: Collective) -> tuple[float, float]:
    """Returns the bytes that a device sends in a step within its slice, and to other slices."""
    kind, slices = collective.kind, collective.slices
    if slices == 1:
        return collective.bytes, 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return 0.0, collective.bytes
    inside = collective.devices // slices
    share = collective.size // inside
    within = moved(kind, collective.size, inside) if inside > 1 else 0.0
    return collective.count * within, collective.count * moved(kind, share, slices)

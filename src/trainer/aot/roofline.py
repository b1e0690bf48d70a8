"""A roofline estimate of a step's time on a chip: a lower bound, not a prediction."""

from typing import NamedTuple

from trainer.aot.chips import Chip
from trainer.aot.collectives import Collective, moved
from trainer.aot.cost import Cost


class Estimate(NamedTuple):
    """Seconds of a step on one device.

    Attributes:
      seconds: the largest part, a lower bound that assumes perfect overlap of all parts.
      serial_seconds: the sum of the parts, as if nothing overlapped.
      compute_seconds: time of matrix products at the peak for their dtype.
      memory_seconds: time of HBM traffic at its bandwidth.
      network_seconds: the larger of ici_seconds and dcn_seconds.
      ici_seconds: time of collectives within a slice, in sequence.
      dcn_seconds: time of collectives between slices, in sequence.
      bound: the name of the largest part: "compute", "memory" or "network".
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

    Assumptions: every part runs at its peak; elementwise operations cost only memory traffic; a collective uses rings
    in both directions of one torus dimension, or of all dimensions if it spans all devices of a slice; rings are closed
    (small slices lack the wraparound links and are half as fast); collectives share no links; latencies are zero.
    Collectives that do not run in every step are left out. A collective over several slices runs within each slice
    first, so that every device sends an equal share to other slices.

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
    """Returns the bytes that a device sends per step within its slice, and to other slices."""
    kind, slices = collective.kind, collective.slices
    if slices == 1:
        return collective.bytes, 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return 0.0, collective.bytes
    inside = collective.devices // slices
    share = collective.size // inside
    within = moved(kind, collective.size, inside) if inside > 1 else 0.0
    return collective.count * within, collective.count * moved(kind, share, slices)

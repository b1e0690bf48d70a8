"""The time of a step on a chip: a roofline, which is a lower bound, and the time of the compiler's schedule."""

from collections.abc import Mapping
from typing import NamedTuple

from trainer.aot.chips import Chip
from trainer.aot.collectives import Collective, moved
from trainer.aot.cost import Cost
from trainer.aot.schedule import Rates, follow


class Estimate(NamedTuple):
    """Seconds of a step on one device. The step has four parts: compute, memory, network and host.

    Attributes:
      seconds: the time of the longest part, a lower bound that assumes perfect overlap of all parts.
      scheduled_seconds: the time of the compiler's schedule: the time of the instructions in sequence, plus
        exposed_network_seconds and exposed_host_seconds. It is between `seconds` and `serial_seconds`.
      serial_seconds: compute + memory + ICI + DCN + host seconds, as if nothing overlapped.
      compute_seconds: time of matrix products at the chip's peak rate for their dtype.
      memory_seconds: time of HBM traffic at the HBM's bandwidth.
      network_seconds: the larger of ici_seconds and dcn_seconds.
      ici_seconds: time of collectives within a slice, in sequence.
      dcn_seconds: time of collectives between slices, in sequence.
      host_seconds: time of copies between the device and its host, in sequence.
      exposed_network_seconds: the part of ici_seconds + dcn_seconds for which the device waits.
      exposed_host_seconds: the part of host_seconds for which the device waits.
      bound: the name of the longest part: "compute", "memory", "network" or "host".
      lower_bound: whether a loop has an unknown trip count. Such a loop counts once, so all times are only lower
        bounds.
    """

    seconds: float
    scheduled_seconds: float
    serial_seconds: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    ici_seconds: float
    dcn_seconds: float
    host_seconds: float
    exposed_network_seconds: float
    exposed_host_seconds: float
    bound: str
    lower_bound: bool


def estimate(cost: Cost, chip: Chip, devices: int, slices: int = 1) -> Estimate:
    """Returns the estimate of a step's time.

    Assumptions: every part runs at the chip's peak rate; elementwise operations cost only memory traffic; a collective
    uses rings in both directions of one torus dimension, or of all dimensions if it spans all devices of a slice; rings
    are closed (small slices lack the wraparound links and are half as fast); collectives share no links; latencies are
    zero. Collectives that do not run in every step are ignored. A collective over several slices runs within each slice
    first, so that every device sends an equal share to other slices. A loop with an unknown trip count runs once.

    The network time is computed from `cost.collectives`, which on TPUs are counted before optimization, whereas the
    schedule is from the optimized module. The exposed network time is therefore `ici_seconds + dcn_seconds` times the
    fraction of the schedule's network time for which the device waits (1 if the schedule has no collectives). The
    scheduled time is clamped to the range from `seconds` to `serial_seconds`.

    Args:
      cost: from `aot.cost.analyze`, per device.
      chip: the chip of the devices.
      devices: the number of devices in the mesh.
      slices: the number of slices in the mesh.
    """
    rates = _rates(chip, devices // slices)
    compute, memory = rates.products(cost.matmul_flops), cost.hbm_bytes / rates.hbm_bandwidth
    host = cost.host_bytes / rates.host_bandwidth
    transfers = [rates.network(collective) for collective in cost.collectives if not collective.conditional]
    ici, dcn = (sum(seconds) for seconds in zip(*transfers, strict=True)) if transfers else (0.0, 0.0)
    network = max(ici, dcn)
    parts = (compute, "compute"), (memory, "memory"), (network, "network"), (host, "host")
    seconds, bound = max(parts, key=lambda part: part[0])
    serial = compute + memory + ici + dcn + host
    times = follow(cost.schedule, rates)
    exposed = (ici + dcn) * (times.exposed_network / times.network if times.network else 1.0)
    scheduled = min(max(times.device + exposed + times.exposed_host, seconds), serial)
    return Estimate(
        seconds,
        scheduled,
        serial,
        compute,
        memory,
        network,
        ici,
        dcn,
        host,
        exposed,
        times.exposed_host,
        bound,
        bool(cost.unknown_loops),
    )


def _rates(chip: Chip, slice_devices: int) -> Rates:
    """Returns the rates of a device in a slice of `slice_devices` devices."""

    def products(matmul_flops: Mapping[str, float]) -> float:
        return sum(flops / chip.flops(dtype) for dtype, flops in matmul_flops.items())

    def network(collective: Collective) -> tuple[float, float]:
        inside, between = _bytes(collective)
        dimensions = 1 if collective.devices // collective.slices >= slice_devices else chip.torus
        ici, dcn = chip.ici_bandwidth / chip.devices / dimensions, chip.dcn_bandwidth / chip.devices
        return inside / ici, between / dcn

    return Rates(products, network, chip.hbm_bandwidth / chip.devices, chip.host_bandwidth / chip.devices)


def _bytes(collective: Collective) -> tuple[float, float]:
    """Returns the bytes that a device sends for a collective in one step: within its slice, and to other slices."""
    kind, slices = collective.kind, collective.slices
    if slices == 1:
        return collective.bytes, 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return 0.0, collective.bytes
    inside = collective.devices // slices
    share = collective.size // inside
    within = moved(kind, collective.size, inside) if inside > 1 else 0.0
    return collective.count * within, collective.count * moved(kind, share, slices)

"""Formats a report as text."""

from collections.abc import Iterator

from trainer.aot.buffers import by_kind
from trainer.aot.chips import fraction_variable
from trainer.aot.report import Report
from trainer.aot.roofline import Estimate
from trainer.config.words import counted
from trainer.observe.text import short_time, si

GIB = 1024**3
_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16"}
_SHOWN = 8  # the maximum number of buffers, and of collectives, in the text


def report_text(report: Report) -> str:
    """Returns the report for a terminal."""
    return "\n".join([*_head(report), *_memory(report), *_buffers(report), *_cost(report), *_missing(report)])


def verdict(report: Report) -> str:
    """Returns a line that states whether the step fits."""
    peak = gib(report.memory.peak)
    hbm = gib(report.hbm_bytes or 0)
    if report.hbm_bytes is None:
        return f"takes {peak} on each simulated device"
    if report.fits:
        return f"fits: {peak} of {hbm} on each device ({report.memory.peak / report.hbm_bytes:.0%})"
    over = max(report.memory.peak - report.hbm_bytes, 0)
    fraction = report.fitting_fraction
    instead = f"; with {fraction_variable()}={fraction:g} it fits" if fraction else ""
    return f"does not fit: it needs {peak} on each device, {gib(over)} more than the available {hbm}{instead}"


def _head(report: Report) -> Iterator[str]:
    slices = f", {report.num_slices} slices" if report.num_slices > 1 else ""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items()) or "one device"
    yield f"{report.topology}{slices}: {report.devices} x {report.device_kind}, {mesh}"
    if report.pipeline:
        yield f"pipeline: {report.pipeline}"
    yield f"traced in {short_time(report.trace_seconds)}, compiled in {short_time(report.compile_seconds)}"
    yield ""
    yield verdict(report)
    if report.hbm_bytes is not None and report.fraction is not None:
        card = gib(report.hbm_bytes / report.fraction)
        yield f"  available is {report.fraction:g} of a GPU's {card}, which {fraction_variable()} sets"
    if report.rematerialized:
        values = counted(report.rematerialized, "value")
        yield f"  XLA recomputes {values} to save memory; all numbers include the recomputation"


def _memory(report: Report) -> Iterator[str]:
    memory, kinds = report.memory, by_kind(report.buffers)
    yield _row("arguments", memory.arguments)
    for name, size in report.state.items():
        if size:
            yield _row(f"  {name}", size)
    if memory.outputs - memory.aliased > GIB // 1024:
        yield _row("other outputs", memory.outputs - memory.aliased)
    yield _row("temporaries", memory.temporaries)
    for kind, size in kinds.items():
        if size:
            yield _row(f"  {kind}", size)
    fragmentation = memory.temporaries - sum(kinds.values())
    if report.buffers and fragmentation > GIB // 1024:
        yield _row("  fragmentation", fragmentation)
    if memory.host:
        yield _row("host memory", memory.host)


def _buffers(report: Report) -> Iterator[str]:
    if report.buffers:
        yield ""
        yield "largest temporaries at the peak:"
    for buffer in report.buffers[:_SHOWN]:
        name = buffer.op_name or buffer.name
        name = name if len(name) <= 60 else f"...{name[-57:]}"
        source = buffer.source.rpartition("/trainer/")[2]  # relative to the package `trainer` if possible
        yield f"{gib(buffer.size):>12}  {buffer.shape:<26} {name}  {source}".rstrip()


def _cost(report: Report) -> Iterator[str]:
    cost = report.cost
    yield ""
    at_least = "at least " if cost.unknown_loops else ""
    yield f"a step, per device: {at_least}{si(cost.flops, 'FLOP')}, {si(cost.bytes_accessed, 'B')} accessed"
    for collective in sorted(cost.collectives, key=lambda collective: -collective.bytes)[:_SHOWN]:
        along = ", ".join(collective.axes) or "no axis"
        count = f"{collective.count} x {si(collective.size, 'B')}"
        ring = ", partial sums" if collective.kind == "collective-permute" and collective.sums else ""
        at_times = ", not in every step" if collective.conditional else ""
        what = f"{collective.kind} {collective.dtype} along {along}, {count}{ring}{at_times}"
        yield f"{si(collective.bytes, 'B'):>12}  {what}"
    if report.gradients_reduced_in:
        dtypes = " and ".join(report.gradients_reduced_in)
        others = " and ".join(dtype for dtype in report.gradients_reduced_in if dtype != _HLO_DTYPES[report.grad_dtype])
        why = f"; {others} instead of grad_dtype={report.grad_dtype} where their operands are in {others}"
        yield f"  gradients are reduced in {dtypes}{why if others else ''}"
    for note in cost.notes:
        yield f"  not counted: {note}"
    if report.estimate:
        yield from _time(report.estimate)


def _time(time: Estimate) -> Iterator[str]:
    waits = (("network", time.exposed_network_seconds), ("host", time.exposed_host_seconds))
    waited = " and ".join(f"{short_time(seconds)} for the {link}" for link, seconds in waits if seconds)
    yield (
        f"estimate: {short_time(time.scheduled_seconds)} per step as the compiler scheduled it"
        + (f"; of these the device waits {waited}" if waited else "")
    )
    parts = [("compute", time.compute_seconds), ("memory", time.memory_seconds), ("network", time.network_seconds)]
    parts += [("host", time.host_seconds)] if time.host_seconds else []
    shown = ", ".join(f"{name} {short_time(seconds)}" for name, seconds in parts)
    yield f"  at least {short_time(time.seconds)}, bound by {time.bound} ({shown})"
    yield f"  {short_time(time.serial_seconds)} if nothing overlaps"
    if time.lower_bound:
        yield "  lower bound: the trip count of a loop is unknown; one iteration is counted"


def _missing(report: Report) -> Iterator[str]:
    if report.suggestions:
        yield ""
        yield "a setting that saves more tensors and still fits:" if report.fits else "settings to try, cheapest first:"
    for suggestion in report.suggestions:
        yield f"  {suggestion.settings}  ({suggestion.price})"


def _row(name: str, size: int) -> str:
    return f"  {name:<36}{gib(size):>12}"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 100 else f"{size / 1024**2:.2f} MiB"

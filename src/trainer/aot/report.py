"""Reports the memory, the cost and the estimated time of a compiled step, without running it."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.aot.buffers import Buffer, by_kind, leaves, temporaries
from trainer.aot.chips import Chip, chip_of, memory_fraction
from trainer.aot.cost import Cost, analyze
from trainer.aot.dump import Dump
from trainer.aot.roofline import Estimate, estimate
from trainer.aot.suggest import Suggestion
from trainer.models.families import stacks
from trainer.models.stages import stage_text

_TEMPORARIES = re.compile(r"^allocation \d+: size (\d+),(?: color 0,)? page \d+, preallocated-temp:", re.MULTILINE)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# Matches the TPU compiler's message about a step that does not fit. The groups are the number and the unit of the size
# that the message reports.
OUT_OF_MEMORY = re.compile(
    r"(?:CompileTimeHbmOom|Ran out of memory in memory space hbm).*?([\d.]+)([KMGT]?)\b", re.DOTALL
)
DOES_NOT_FIT = 3  # the exit code of a command whose compiled step does not fit
LARGEST = 12  # the maximum number of buffers in a report
# The largest memory fraction to suggest for JAX's allocator on a GPU: CUDA, NCCL and the compiled code need the rest.
_MOST = 0.95
# Instructions that XLA duplicated for lack of memory, and asynchronous copies of such instructions.
_REMATERIALIZED = re.compile(r"^\s+(?:ROOT )?%[\w.-]+\.remat\d*[\w.-]* = ", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """The memory of a step, in bytes on one device.

    Attributes:
      arguments: the train state, the frozen arrays, and the batch.
      outputs: the new state and the metrics.
      aliased: the part of the outputs that reuses the memory of arguments.
      temporaries: the size of the allocation for temporaries, including fragmentation.
      peak: arguments + outputs - aliased + temporaries. The compiler reserves the temporaries for the whole step.
      code: the program itself.
      host: arguments and temporaries in host memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    code: int
    host: int


@dataclass(frozen=True)
class Report:
    """The report on one step on one topology. Bytes and FLOPs are per device."""

    topology: str
    num_slices: int
    device_kind: str
    devices: int
    mesh: Mapping[str, int]
    pipeline: str  # a description of the pipeline's stages; "" without a pipeline
    memory: Memory
    hbm_bytes: int | None  # HBM of a device that programs can use; None for simulated devices
    fraction: float | None  # hbm_bytes as a fraction of a GPU's memory; None for other devices
    fits: bool | None
    state: Mapping[str, int]  # bytes of each argument of the step: parameters, optimizer, ...
    buffers: tuple[Buffer, ...]  # temporaries that are live at the peak
    cost: Cost
    rolled_flops: float
    rolled_bytes_accessed: float
    estimate: Estimate | None
    grad_dtype: str
    trace_seconds: float
    compile_seconds: float
    rematerialized: int = 0  # number of instructions that XLA itself recomputes to save memory
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def fitting_fraction(self) -> float | None:
        """The smallest fraction of a GPU's memory in which the step fits, rounded up to hundredths; None if the devices
        are not GPUs, or if the fraction exceeds `_MOST`."""
        if self.hbm_bytes is None or self.fraction is None:
            return None
        fraction = math.ceil(100 * self.memory.peak * self.fraction / self.hbm_bytes) / 100
        return fraction if fraction <= _MOST else None

    @property
    def gradients_reduced_in(self) -> list[str]:
        """The dtypes, in HLO's spelling, in which gradients are all-reduced, reduce-scattered or summed in a
        ring."""
        sums = [each for each in self.cost.collectives if each.sums and each.size > 1024]
        return sorted({each.dtype for each in sums if any("transpose(" in source for source in each.sources)})

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
        memory = self.memory
        over = memory.peak - self.hbm_bytes if self.hbm_bytes is not None else None
        return {
            **{name: getattr(self, name) for name in ("topology", "num_slices", "device_kind", "devices")},
            "mesh": dict(self.mesh),
            "pipeline": self.pipeline,
            "argument_bytes": memory.arguments,
            "output_bytes": memory.outputs,
            "alias_bytes": memory.aliased,
            "temp_bytes": memory.temporaries,
            "peak_bytes": memory.peak,
            "generated_code_bytes": memory.code,
            "host_bytes": memory.host,
            "hbm_bytes": self.hbm_bytes,
            "memory_fraction": self.fraction,
            "fitting_fraction": self.fitting_fraction,
            "rematerialized": self.rematerialized,
            "fits": self.fits,
            "missing_bytes": None if over is None else max(over, 0),
            "breakdown": {**self.state, **by_kind(self.buffers)},
            "largest_buffers": [buffer._asdict() for buffer in self.buffers[:LARGEST]],
            "flops": self.cost.flops,
            "bytes_accessed": self.cost.bytes_accessed,
            "rolled_flops": self.rolled_flops,
            "rolled_bytes_accessed": self.rolled_bytes_accessed,
            "matmul_flops": self.cost.matmul_flops,
            "hbm_bytes_accessed": self.cost.hbm_bytes,
            "host_bytes_accessed": self.cost.host_bytes,
            "grad_dtype": self.grad_dtype,
            "gradients_reduced_in": self.gradients_reduced_in,
            "collectives": [dataclasses.asdict(collective) for collective in self.cost.collectives],
            "estimate": self.estimate._asdict() if self.estimate else None,
            "suggestions": [suggestion._asdict() for suggestion in self.suggestions],
            "notes": list(self.cost.notes),
            "trace_seconds": self.trace_seconds,
            "compile_seconds": self.compile_seconds,
        }


class Step(Protocol):
    """The interface of steps to report on, such as `training.Run` and decode steps."""

    @property
    def config(self) -> Any:
        """The resolved configuration."""

    @property
    def mesh(self) -> Any:
        """The mesh of the devices."""

    def parts(self) -> Mapping[str, Any]:
        """The step's arguments by name: trees of ShapeDtypeStructs with shardings. One of the names is "parameters"."""


def make_report(
    step: Step, compiled: Any | None, failure: str, dump: Dump, seconds: tuple[float, float], num_slices: int
) -> Report:
    """Returns the report of a compilation.

    Args:
      step: the step that was compiled.
      compiled: the compiled step; None if it did not fit.
      failure: the compiler's message if the step did not fit.
      dump: the compiler's dumps.
      seconds: (seconds of tracing, seconds of compiling).
      num_slices: the number of slices that contain the devices.
    """
    first = step.mesh.devices.flat[0]
    chip = chip_of(first.device_kind)
    parts = step.parts()
    state = {name: sum(leaf.bytes for leaf in leaves(part)) for name, part in parts.items()}
    shapes = [shape for leaf in leaves(parts["parameters"]) for shape in (leaf.dims, leaf.global_dims)]
    memory = memory_of(compiled) if compiled is not None else _memory_of_failure(failure, dump, sum(state.values()))
    # Prefer the dumped text: jaxlib cannot print every program of a newer libtpu. An example is llama3.1-70b on v5p
    # with libtpu 0.0.51.
    text = dump.optimized or (compiled.as_text() if compiled is not None else "")
    # On GPUs, count collectives in the optimized module, which contains each collective once and in the form in which
    # it runs.
    partitioned = dump.partitioned if first.platform != "gpu" else ""
    cost = analyze(text, step.mesh, partitioned or None)
    rolled = (compiled.cost_analysis() if compiled is not None else None) or {}  # None for absent GPUs
    return Report(
        topology=step.config.compile_topology,
        num_slices=num_slices,
        device_kind=first.device_kind,
        devices=step.mesh.size,
        mesh={axis: size for axis, size in step.mesh.shape.items() if size > 1},
        pipeline=stage_text(stacks(step.config)),
        memory=memory,
        hbm_bytes=chip.usable if chip else None,
        fraction=memory_fraction() if chip and chip.pool else None,
        rematerialized=len(_REMATERIALIZED.findall(text)),
        fits=_fits(compiled, memory, chip),
        state=state,
        buffers=temporaries(dump, shapes),
        cost=cost,
        rolled_flops=rolled.get("flops", cost.rolled_flops),
        rolled_bytes_accessed=rolled.get("bytes accessed", cost.rolled_bytes_accessed),
        estimate=estimate(cost, chip, step.mesh.size, num_slices) if chip else None,
        grad_dtype=step.config.grad_dtype,
        trace_seconds=round(seconds[0], 2),
        compile_seconds=round(seconds[1], 2),
    )


def _fits(compiled: Any | None, memory: Memory, chip: Chip | None) -> bool | None:
    """Returns whether the step fits: the compiler accepted it, and its peak including arguments is within the HBM.
    Returns None for simulated devices."""
    if chip is None:
        return None
    return compiled is not None and memory.peak <= chip.usable


def memory_of(compiled: Any) -> Memory:
    """Returns the memory that `compiled`, a training step, takes on one device."""
    stats = compiled.memory_analysis()
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        # The peak that the compiler reports is not used: on CPUs, it omits temporaries; on TPUs, it omits fragmentation
        # and includes other memory spaces.
        peak=taken + stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    )


def _memory_of_failure(failure: str, dump: Dump, arguments: int) -> Memory:
    """Returns the memory of a step that did not fit. The size of the temporaries is from the dumped buffer assignment
    or, without one, from the compiler's message `failure`."""
    sizes = _TEMPORARIES.findall(dump.assignment)
    if sizes:
        temporary = max(map(int, sizes))
    else:
        said = OUT_OF_MEMORY.search(failure)
        assert said is not None, failure
        temporary = int(float(said[1]) * 1024 ** _UNITS[said[2]])
    return Memory(arguments, arguments, arguments, temporary, arguments + temporary, 0, 0)

"""The cost of a step: FLOPs, memory traffic and collectives, from the HLO text of a compiled module."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trainer.aot.collectives import Collective, collectives
from trainer.aot.counts import Counter
from trainer.aot.hlo import parse
from trainer.aot.schedule import Event, schedule_of


@dataclass(frozen=True)
class Cost:
    """The cost of one step on one device.

    Attributes:
      flops: operations of matrix products, kernels and elementwise instructions.
      matmul_flops: operations of matrix products and kernels, by the dtype of their operands in HLO's spelling
        ("bf16").
      transcendentals: the number of values of exp, log, tanh and similar functions.
      bytes_accessed: bytes read and written in all memories.
      hbm_bytes: bytes read and written in main memory, without arrays that a TPU's compiler keeps in VMEM.
      rolled_flops, rolled_bytes_accessed: `flops` and `bytes_accessed` with each loop body counted once, as in JAX's
        `cost_analysis()`.
      collectives: grouped by kind, dtype, axes and size; see `aot.collectives`.
      notes: messages about what could not be counted exactly; empty if everything was.
      host_bytes: bytes read and written in the host's memory, over the link between device and host.
      schedule: the program's events in execution order; see `aot.schedule`.
      unknown_loops: loops whose trip count is unknown, for example because it depends on data. Each counts as one
        iteration.
    """

    flops: float
    matmul_flops: dict[str, float]
    transcendentals: float
    bytes_accessed: float
    hbm_bytes: float
    rolled_flops: float
    rolled_bytes_accessed: float
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...]
    unknown_loops: tuple[str, ...] = ()
    host_bytes: float = 0.0
    schedule: tuple[Event, ...] = field(default=(), compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists and numbers, for JSON, without the schedule."""
        values = dataclasses.asdict(dataclasses.replace(self, schedule=()))
        del values["schedule"]
        return values


def analyze(hlo_text: str, mesh: Any = None, partitioned_text: str | None = None) -> Cost:
    """Returns the cost of a step, per device.

    Args:
      hlo_text: the optimized module, `compiled.as_text()`.
      mesh: the `jax.sharding.Mesh` of the compilation, or an ordered mapping from axis name to size. It
        determines the axes of collectives; if it is None, they are reported without axes.
      partitioned_text: the module after partitioning (`aot.dump`), in which collectives are counted. Without it, TPU
        collectives are counted too often, because the optimized module repeats a collective in every fusion that
        overlaps it. On CPU the optimized module gives the same counts.

    Raises:
      ValueError: a text is not an HLO module.
    """
    module = parse(hlo_text)
    unrolled = Counter(module, rolled=False)
    totals = unrolled.computation(module.entry)
    rolled = Counter(module, rolled=True).computation(module.entry)
    transfers, unknown = collectives(parse(partitioned_text) if partitioned_text else module, mesh)
    if not partitioned_text and '"AsyncCollectiveStart"' in hlo_text:
        unrolled.notes.append("collectives are counted in the optimized module, which repeats overlapped collectives")
    unknown = list(dict.fromkeys([*unrolled.unknown, *unknown]))
    notes = [f"the trip count of the loop {loop} is unknown: counted once" for loop in unknown]
    return Cost(
        flops=totals.flops,
        matmul_flops=totals.matmul_flops,
        transcendentals=totals.transcendentals,
        bytes_accessed=totals.bytes,
        hbm_bytes=totals.main_bytes,
        rolled_flops=rolled.flops,
        rolled_bytes_accessed=rolled.bytes,
        collectives=transfers,
        notes=tuple(dict.fromkeys([*notes, *unrolled.notes])),
        unknown_loops=tuple(unknown),
        host_bytes=totals.host_bytes,
        schedule=schedule_of(unrolled, mesh),
    )

"""Loads or compiles the training step of a run, and determines its memory needs."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.aot import dump, executable
from trainer.aot.kernels import tiles_fit
from trainer.aot.report import memory_of
from trainer.aot.suggest import affordable
from trainer.config.paths import local_path
from trainer.observe.banner import Needs
from trainer.runtime.agreement import agreed, from_first
from trainer.runtime.preemption import ends_at_signals
from trainer.training.memory import device_memory, reported_memory
from trainer.training.run import Run

Say = Callable[[str], None]


def loaded_step(run: Run, say: Say) -> Any:
    """Returns the training step that `trainer.train_compile` saved in the file compiled_trainstep_file; None if that
    key is empty.

    Raises:
      UserError: the file cannot be read, or contains a different step.
    """
    if not run.config.compiled_trainstep_file:
        return None
    path = local_path(run.config.compiled_trainstep_file, "compiled_trainstep_file=")
    devices, args = list(run.mesh.devices.flat), run.abstract_args()
    step = agreed(lambda: executable.load(path, executable.origin_of(run.config, devices, args), args, devices))
    dumped = " and no HLO is written" if run.config.dump_hlo else ""
    say(f"loaded the training step from {path}; nothing is compiled{dumped}")
    return step


def compiled_step(run: Run, place: Any, say: Say) -> Any:
    """Compiles and returns the step. Suggests a `remat_policy` that recomputes less, if one would fit into memory.

    `place`: the run's folder, for the message that is printed on SIGTERM or Ctrl-C.

    Raises:
      UserError: `dump_hlo_local_dir` is not writable.
    """
    found: list[Path] = []

    def find_folder() -> None:
        if run.config.dump_hlo:
            found.append(dump.given_folder(run.config))

    from_first(find_folder)
    say("compiling the training step")
    ended = f"stopped while compiling; no update is lost; run the same command to start again ({place})"
    with tiles_fit(), ends_at_signals(ended), dump.uncached() if found else contextlib.nullcontext():
        traced = run.trace_on_leaves()
        compiled = traced.lower().compile(dump.options(found[0]) if found else None)
    if found:
        say(f"XLA's dump of the training step is in {found[0]}")
    _say_what_fits(run, traced, compiled, say)
    return compiled


def _say_what_fits(run: Run, traced: Any, compiled: Any, say: Say) -> None:
    devices, needed = list(run.mesh.devices.flat), memory_of(compiled).peak
    if better := affordable(run.config, traced.jaxpr, devices[0].platform, needed, reported_memory(devices)):
        say(f"remat_policy={run.config.remat_policy} leaves memory unused: {better.settings} {better.price}")


class StepsByRows:
    """A callable `step(leaves, batch, frozen)` that runs the compiled training step for the number of rows of `batch`.
    If a batch has fewer rows than a full batch, the step for that number is compiled on first use."""

    def __init__(self, run: Run, compiled: Any, say: Say):
        """`compiled`: the step for a full batch."""
        self._run, self._say, self._compiled = run, say, {run.rows: compiled}

    def __call__(self, leaves: Any, batch: Any, frozen: Any) -> Any:
        """Runs the step that is compiled for the number of rows of `batch`."""
        rows = len(batch["row"])
        if rows not in self._compiled:
            self._say(f"compiling the training step for {rows:,} of {self._run.rows:,} rows")
            with tiles_fit():
                self._compiled[rows] = self._run.compile_on_leaves(rows=rows)
        return self._compiled[rows](leaves, batch, frozen)


def needs_of(run: Run, compiled: Any) -> Needs:
    """Returns the memory that a compiled step needs on one device of the run."""
    memory = memory_of(compiled)
    return Needs(memory.peak, memory.arguments, memory.temporaries, device_memory(list(run.mesh.devices.flat)))

"""The compiled step of a run: that of a file, or one that is compiled now; and what it needs."""

from collections.abc import Callable
from typing import Any

from trainer.aot import executable
from trainer.aot.kernels import tiles_fit
from trainer.aot.report import memory_of
from trainer.config.paths import local_path
from trainer.observe import Needs
from trainer.runtime.agreement import agreed
from trainer.runtime.preemption import ends_at_sigterm
from trainer.training.memory import device_memory
from trainer.training.run import Run

Say = Callable[[str], None]


def loaded_step(run: Run, say: Say) -> Any:
    """The step that `trainer.train_compile` compiled; None without `compiled_trainstep_file`.

    Raises:
      UserError: the file cannot be read, or holds another step.
    """
    if not run.config.compiled_trainstep_file:
        return None
    path = local_path(run.config.compiled_trainstep_file, "compiled_trainstep_file=")
    devices, args = list(run.mesh.devices.flat), run.abstract_args()
    step = agreed(lambda: executable.load(path, executable.origin_of(run.config, devices, args), args, devices))
    say(f"the training step is that of {path}, nothing is compiled")
    return step


def compiled_step(run: Run, place: Any, say: Say) -> Any:
    """The step, compiled now; `place` is the run's folder, for what is said at SIGTERM."""
    say("compiling the training step")
    ended = f"SIGTERM: stopped before the first update; the same command starts over ({place})"
    with tiles_fit(), ends_at_sigterm(ended):
        return run.compile_on_leaves()


def needs_of(run: Run, compiled: Any) -> Needs:
    """What a compiled step needs on one device of the run."""
    memory = memory_of(compiled)
    return Needs(memory.peak, memory.arguments, memory.temporaries, device_memory(list(run.mesh.devices.flat)))

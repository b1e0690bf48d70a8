"""A profile of some steps of a run, for XProf, Perfetto and pprof."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from trainer.config.keys import Config
from trainer.config.words import counted

# XProf and TensorBoard's plugin look for profiles in plugins/profile/TIME/, relative to the folder of the events.
TRACES, MEMORY = "tensorboard/plugins/profile", "memory.prof"


class Profiler:
    """Traces the steps that `config` selects into folder/tensorboard/plugins/profile/TIME/. A context manager.

    The device is idle when a trace starts and stops, so that the trace contains complete steps. Every process needs a
    Profiler, because waiting for a step can involve work that all processes must do together and in the same order.
    """

    def __init__(
        self, config: Config, folder: Path, first_step: int, say: Callable[[str], None], *, traces: bool = True
    ):
        """Plans the traces. Each trace has `profiler_steps` steps. The first trace begins
        `skip_first_n_steps_for_profiler` steps after `first_step`, and the next traces begin at intervals of
        `profile_periodically_period` steps. `say` is called with the path of each trace, or with a note if the run ends
        before the first trace. Without `traces`, the Profiler waits for the same steps, but records nothing."""
        self._folder, self._say, self._traces = folder, say, traces
        self._period, self._steps, self._end = config.profile_periodically_period, config.profiler_steps, config.steps
        self._first = first_step + config.skip_first_n_steps_for_profiler  # the first step of the next or current trace
        self._last = self._end - 1
        self._inside = False  # whether the current step is part of the trace
        if self._first > self._last and first_step < config.steps:
            say(f"no step is profiled: the run ends at step {config.steps - 1}, before step {self._first}")

    def before(self, step: int, finish: Callable[[], None]) -> bool:
        """Call this before `step` is dispatched. Returns whether a trace starts. `finish`: a function that waits
        for the earlier steps."""
        if step != self._first or step >= self._end:
            return False
        import jax

        self._last = min(step + self._steps, self._end) - 1
        finish()
        self._inside = True
        if self._traces:
            options = jax.profiler.ProfileOptions()
            # Tracing Python calls would fill the trace and slow the loop down.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._folder / "tensorboard", profiler_options=options)
        return True

    def after(self, step: int, finish: Callable[[], None]) -> bool:
        """Call this after `step` was dispatched. Returns whether a trace stops. `finish`: a function that waits
        for the step."""
        if step != self._last or not self._inside:
            return False
        finish()
        self._stop(step)
        return True

    def _stop(self, last: int | None = None) -> None:
        import jax

        first, self._inside = self._first, False
        self._first += self._period  # with period -1, this is a past step, so no trace follows
        if not self._traces:
            return
        jax.profiler.stop_trace()
        traces = max((self._folder / TRACES).iterdir())  # the newest folder, because the names are times
        jax.profiler.save_device_memory_profile(str(traces / MEMORY))
        if last is None:
            self._say(f"the profile of the run's last steps is in {traces}")
        else:
            steps = counted(last - first + 1, "step")
            self._say(f"the profile of {steps} from step {first} on is in {traces}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._inside:  # the run was interrupted or failed
            self._stop()

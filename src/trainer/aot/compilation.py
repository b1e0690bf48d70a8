"""Compiles a step for devices that this machine lacks, and returns a report on the step."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.errors import JaxRuntimeError

from trainer.aot import dump
from trainer.aot.gpus import parts_present
from trainer.aot.kernels import tiles_fit
from trainer.aot.report import OUT_OF_MEMORY, Report, Step, make_report


def compile_step(
    step: Step,
    lower: Callable[[], Any],
    num_slices: int,
    options: Mapping[str, Any] | None = None,
    keep: Path | None = None,
) -> tuple[Any | None, Report]:
    """Compiles a step. If the step does not fit in memory, returns a report that shows this, and raises no error.

    Args:
      step: the step to report on.
      lower: a function that lowers the step and returns the result.
      num_slices: the number of slices over which the devices are distributed.
      options: additional XLA compiler options.
      keep: a folder to which the compiler's dumps are copied.

    Returns:
      The executable (None if the step does not fit), and the report.
    """
    began = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    compiled, failure = None, ""
    with tempfile.TemporaryDirectory() as folder, dump.uncached():
        try:
            with tiles_fit(), parts_present():
                compiled = lowered.compile({**dump.options(folder), **(options or {})})
        except JaxRuntimeError as error:
            if not OUT_OF_MEMORY.search(str(error)):
                raise
            failure = str(error)
        seconds = traced - began, time.perf_counter() - traced
        if keep:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        return compiled, make_report(step, compiled, failure, dump.read(folder), seconds, num_slices)

"""Prepares parts of the data with Apache Beam: in this process for tests, or on a cluster that shares the data
folders."""

import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config.errors import UserError

_ERROR = "error.txt"  # the file for the message of a UserError that another machine raises
Task = Callable[[int], object]


def run(task: Task, parts: Sequence[int], options: str, folder: Path) -> None:
    """Calls `task` for each of `parts` in a pipeline with Beam's `options`, such as `--runner=FlinkRunner`.

    `task` must be picklable. It may be called several times for a part, even concurrently. `folder`: a folder that is
    shared with the workers, for their error messages.

    Raises:
      UserError: apache-beam is missing or rejects an option, or `task` raised a UserError.
    """
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError("beam= needs Apache Beam: pip install 'trainer[beam]'") from error
    (folder / _ERROR).unlink(missing_ok=True)
    try:
        created = apache_beam.Pipeline(options=PipelineOptions(shlex.split(options)))
    except ValueError as error:
        raise UserError(f"beam={options}: {error}") from error
    with created as pipeline:
        numbers = pipeline | apache_beam.Create(parts) | apache_beam.Reshuffle()
        _ = numbers | "prepare a part" >> apache_beam.Map(functools.partial(_call, task, folder))
    if (folder / _ERROR).exists():
        raise UserError((folder / _ERROR).read_text(encoding="utf-8"))


def _call(task: Task, folder: Path, part: int) -> None:
    try:
        task(part)
    except UserError as error:  # not raised, because Beam would retry, only to get the same error
        (folder / _ERROR).write_text(str(error), encoding="utf-8")

"""Batches of a run: where they come from, and the check that they have the fields of the objective."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import numpy as np

from trainer.config import UserError
from trainer.data import Batch, Dataset, Loader, Position, eval_batches
from trainer.runtime.place import share_of_rows
from trainer.training.run import Run
from trainer.training.start import Start


class BatchSource(Protocol):
    """The batches of a run: one for each update, and those of its evaluations. They have the fields of the objective
    and `row` (`objectives.batch_fields`). With several processes each gets its part (`runtime.place.share_of_rows`)."""

    waited: float  # seconds spent waiting in all calls of `take` so far

    def take(self, state: Callable[[], Any]) -> tuple[Batch, Position]:
        """The next batch, of `run.rows` rows, and the position in the data after it. `state()` returns the native train
        state, for a source whose batches depend on it."""

    def held_out(self) -> Iterable[Batch]:
        """The batches of one evaluation, of `run.eval_rows` rows. Only called with eval_interval above 0."""


class LoadedAhead(Loader[tuple[Batch, Position]]):
    """Batches of the data set; they do not depend on the state."""

    def __init__(self, run: Run, dataset: Dataset, start: Start):
        self._run, self._dataset = run, dataset
        share = share_of_rows(run.batch_shardings["row"], run.rows)
        stream = dataset.train_stream(start.position, rows=run.rows, **share)
        super().__init__(stream, max(0, run.config.steps - start.updates))

    def take(self, state: Callable[[], Any]) -> tuple[Batch, Position]:
        """See `BatchSource.take`."""
        del state
        return next(self)

    def held_out(self) -> Iterable[Batch]:
        """See `BatchSource.held_out`."""
        return held_out_batches(self._run, self._dataset)


def held_out_batches(run: Run, dataset: Dataset) -> Iterable[Batch]:
    """This process's part of the held-out rows, or of the first `eval_steps` batches of them."""
    assert dataset.evaluation is not None, "eval_interval is above 0"
    share = share_of_rows(run.batch_shardings["row"], run.eval_rows)
    return eval_batches(dataset.evaluation, run.eval_rows, run.config.eval_steps, **share)


def check_batch(run: Run, batch: Batch, rows: int) -> None:
    """Checks that `batch`, this process's part of `rows` rows, has the fields of the run's objective. It may have more.

    Raises:
      UserError: names every field that is missing or has another shape or dtype, and the fields that nothing reads.
    """
    parts = share_of_rows(run.batch_shardings["row"], rows)["process_count"]
    wanted = run.abstract_batch(rows // parts)  # of its shardings nothing is read
    problems = [f"no {name} ({_words(array)})" for name, array in wanted.items() if name not in batch]
    problems += [
        f"{name} is {_words(batch[name])} in place of {_words(array)}"
        for name, array in wanted.items()
        if name in batch and (batch[name].shape, batch[name].dtype) != (array.shape, array.dtype)
    ]
    if not problems:
        return
    unread = [name for name in batch if name not in wanted]
    also = f"; the objective does not read {', '.join(unread)}" if unread else ""
    objective = type(run.objective).__name__
    raise UserError(f"a batch does not have the fields of the objective {objective}: {'; '.join(problems)}{also}")


def _words(array: np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{np.dtype(array.dtype).name}[{', '.join(map(str, array.shape))}]"

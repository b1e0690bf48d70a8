"""The sources of a run's batches, and the check that a batch has the fields of the objective."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from trainer.config.capabilities.context_keys import token_order
from trainer.config.derived import eval_parts
from trainer.config.errors import UserError
from trainer.data.batches import Batch, eval_batches
from trainer.data.dataset import Dataset
from trainer.data.loader import Loader
from trainer.data.streams import Position
from trainer.objectives.base import placed_fields, prepared, unevaluated_of
from trainer.ops.order import reorder
from trainer.runtime.place import place, share_of_rows
from trainer.training.run import Run
from trainer.training.start import Start


class BatchSource(Protocol):
    """The batches of a run: one per update, and the batches of its evaluations.

    Each batch has the objective's fields and the field `row` (`objectives.base.batch_fields`). With several processes,
    each process gets its share of the rows (`runtime.place.share_of_rows`). A source may compute on the devices.
    """

    waited: float  # total seconds that calls of `take` have waited so far
    updates: int  # updates come in groups of this number; a run is saved, and ends, only between groups
    metrics: dict[str, float]  # metrics of the last batch, which are logged with its update

    def take(self, state: Callable[[], Any], interrupted: Callable[[], bool]) -> tuple[Batch, Position] | None:
        """Returns the next batch, and the position of the data after this batch. The batch has `run.rows` rows, or the
        rows of only some of the microbatches of an update.

        `state()` returns the native train state, for a source whose batches depend on it. A slow source may return None
        as soon as `interrupted()` is true.
        """

    def held_out(self, state: Callable[[], Any]) -> Iterable[Batch]:
        """Returns the batches of one evaluation, `run.eval_rows` rows each. Called only if eval_interval is above 0."""


class LoadedAhead(Loader[tuple[Batch, Position]]):
    """Batches from the data set, loaded ahead because they do not depend on the train state."""

    def __init__(self, run: Run, dataset: Dataset, start: Start):
        self._run, self._dataset = run, dataset
        self._images = {} if run.config.dataset_type == "synthetic" else start.about.images
        self.updates, self.metrics = 1, dict[str, float]()
        share = share_of_rows(run.batch_shardings["row"], run.rows)
        stream = dataset.train_stream(start.position, rows=run.rows, **share)
        super().__init__(stream, max(0, run.config.steps - start.updates))

    def take(self, state: Callable[[], Any], interrupted: Callable[[], bool]) -> tuple[Batch, Position]:
        """See `BatchSource.take`. Raises UserError if a row contains an image token."""
        del state, interrupted
        batch, position = next(self)
        check_no_images(batch, self._images)
        return batch, position

    def held_out(self, state: Callable[[], Any]) -> Iterable[Batch]:
        del state
        return held_out_batches(self._run, self._dataset)


def held_out_batches(run: Run, dataset: Dataset) -> Iterable[Batch]:
    """Returns this process's share of the held-out batches. If `eval_steps` is set, returns only the batches of the
    first `eval_steps` steps."""
    assert dataset.evaluation is not None, "without held-out data, eval_interval must be 0"
    share = share_of_rows(run.batch_shardings["row"], run.eval_rows)
    steps = run.config.eval_steps
    count = steps if steps < 0 else steps * eval_parts(run.config)
    given = run.given_batch(run.eval_rows // share["process_count"])
    unread = {name: np.zeros(given[name].shape, given[name].dtype) for name in unevaluated_of(run.objective)}
    return ({**batch, **unread} for batch in eval_batches(dataset.evaluation, run.eval_rows, count, **share))


def check_no_images(batch: Batch, images: Mapping[int, str]) -> None:
    """Checks that no row of a batch contains an image token, because the model has no vision tower to replace the
    token. `images` maps the image tokens to the fields of config.json that define them.

    Raises:
      UserError: a row contains an image token; the message names the row and the token.
    """
    for name in ("inputs", "targets") if images else ():
        found = np.isin(batch[name], list(images)) & (batch[f"{name}_segmentation"] > 0)
        if found.any():
            token = int(batch[name][found][0])
            raise UserError(
                f"row {batch['row'][found.any(axis=1)][0]} of a batch of training data has the token {token}, which "
                f"stands for an image ({images[token]}); only text can be trained: leave such documents out"
            )


def check_batch(run: Run, batch: Batch, rows: int) -> None:
    """Checks that `batch`, this process's share of `rows` rows, has the fields of the run's objective.

    Raises:
      UserError: a field is missing or has the wrong shape or dtype. The message names all such fields, and additional
        fields, which by themselves are not an error.
    """
    parts = share_of_rows(run.batch_shardings["row"], rows)["process_count"]
    wanted = run.given_batch(rows // parts)  # only shapes and dtypes are used, not the shardings
    problems = [f"no {name} ({_words(array)})" for name, array in wanted.items() if name not in batch]
    problems += [
        f"{name} is {_words(batch[name])} instead of {_words(array)}"
        for name, array in wanted.items()
        if name in batch and (batch[name].shape, batch[name].dtype) != (array.shape, array.dtype)
    ]
    if not problems:
        return
    unread = [name for name in batch if name not in wanted]
    also = f"; the objective does not read {', '.join(unread)}" if unread else ""
    objective = type(run.objective).__name__
    raise UserError(f"a batch does not have the fields of the objective {objective}: {'; '.join(problems)}{also}")


def placed(run: Run, batch: Mapping[str, Any], rows: int | None = None) -> dict[str, jax.Array]:
    """Returns a batch that passed `check_batch`, on the devices of `run`. Adds the arrays that the objective derives,
    and reorders tokens as `config.capabilities.context_keys.token_order` specifies. `rows`: see
    `runtime.place.place`."""
    batch, moved = prepared(run.objective, batch), token_order(run.config)
    if moved is not None:
        strategy, n = moved
        fields = placed_fields(run.objective).items()
        of_tokens = {name: batch[name] for name, field in fields if "length" in field.shape[1:2]}
        batch = {**batch, **reorder(of_tokens, n, strategy)}
    return place(batch, run.batch_shardings, rows)


def _words(array: np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{np.dtype(array.dtype).name}[{', '.join(map(str, array.shape))}]"

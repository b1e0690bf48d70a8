"""Evaluation on tasks during a training run, with the run's current parameters, on its mesh."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from trainer.config.errors import UserError
from trainer.data.tokenizer import Tokenizer
from trainer.evaluation.model import EvaluatedModel, Interrupted
from trainer.evaluation.scores import Result, fields, table
from trainer.evaluation.specs import Spec
from trainer.evaluation.tasks import keep, open_tasks
from trainer.inference.of_run import engine_of_run, trained_variables
from trainer.inference.text import Chat
from trainer.observe.metrics import TASKS_FAILED, TASKS_TIME
from trainer.observe.rundir import EVALUATIONS, RunDir
from trainer.training.run import Run

Say = Callable[[str], None]


class RunTasks:
    """Evaluates a run on its tasks; a function of the type `training.loop.Tasks`. Evaluates the same parameters as the
    run's other evaluations: with ema_decay, the average of the parameters.

    All processes run every task together, on the run's mesh. Scores depend only on the parameters and the tasks, so a
    resumed run gets the same scores.
    """

    def __init__(
        self,
        run: Run,
        specs: Sequence[Spec],
        tokenizer: Tokenizer | None,
        chat: Chat | None,
        stop: Sequence[int],
        say: Say,
        images: Mapping[int, str] = {},
    ):
        """Opens the tasks, so that missing data are reported before the run begins.

        Args:
          stop: the tokens that end an answer.
          images: the image tokens of a multimodal model, see `About.images` in `trainer.leaves.about`.

        Raises:
          UserError: see `open_tasks` and `engine_of_run`.
        """
        self._tokenizer, self._chat, self._stop, self._say, self._images = tokenizer, chat, stop, say, images
        self._tasks = open_tasks(specs, run.config, tokenizer, say)
        self._engine = engine_of_run(run, round(run.config.per_device_batch_size * run.mesh.size) or 1)
        self._variables = jax.jit(trained_variables(run))
        self._folder: Any = None
        self._aborts, self._seconds = run.config.abort_on_eval_tasks_error, run.config.eval_tasks_timeout_seconds

    def to(self, run_dir: RunDir) -> "RunTasks":
        """Sets the folder for scores, questions and answers. Returns `self`."""
        self._folder = run_dir.path / EVALUATIONS
        return self

    def __call__(self, state: Any, updates: int, interrupted: Callable[[], bool]) -> dict[str, Any] | None:
        """Runs the tasks on the parameters in `state`, after `updates` updates. Prints the scores and returns them as a
        row of metrics.jsonl; returns None if the run is interrupted.

        If a task raises UserError, the error is printed and the task counts as failed.

        Raises:
          UserError: a task fails and abort_on_eval_tasks_error is true, or the answers cannot be written to disk.
        """
        started = time.perf_counter()
        params = self._engine.hold(*self._variables(state))
        how = self._tokenizer, self._stop, self._chat, interrupted, self._say, self._images
        model = EvaluatedModel(self._engine, params, *how)
        results: list[Result] = []
        failed = 0
        with contextlib.suppress(Interrupted):
            for task in self._tasks:
                model.begin_task(self._seconds)
                try:
                    results += task.run(model)
                except UserError as error:
                    if self._aborts:
                        raise
                    failed += 1
                    self._say(f"evaluation after {updates:,} updates: the task {task.name} failed: {error}")
            if self._folder is not None:
                keep(self._folder / f"{updates:06d}", results)
            self._say(f"tasks after {updates:,} updates:\n{table(results)}" if results else "no task has a score")
            seconds = time.perf_counter() - started
            return {"step": updates - 1, **fields(results), TASKS_FAILED: failed, TASKS_TIME: seconds}
        return None

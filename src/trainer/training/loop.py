"""The training loop. The host dispatches a step before it reads the metrics of the previous one.

The device therefore never waits for the host.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.save import maybe_save_checkpoint
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.errors import RunStopped, UserError
from trainer.config.words import counted
from trainer.data.batches import Batch
from trainer.data.dataset import Dataset
from trainer.data.streams import Position
from trainer.data.tokenizer import Tokenizer
from trainer.observe.goodput import SAVE
from trainer.observe.profiler import Profiler
from trainer.runtime.agreement import from_first
from trainer.runtime.place import replicate, share_of_rows
from trainer.runtime.preemption import Preemption
from trainer.runtime.supervision import EVALUATION
from trainer.training.batches import BatchSource, LoadedAhead, check_batch, placed
from trainer.training.evaluate import summarize
from trainer.training.finite import check_finite, names_not_finite
from trainer.training.memory import memory_in_use
from trainer.training.run import Run
from trainer.training.start import Start

Row = dict[str, Any]


_NO_TOKENS = (
    "0 tokens contribute to the loss in the {batches} of this run, so no update was made: the prompts fill the rows, "
    "or the completions are empty; raise max_target_length, set use_truncation=false or "
    "sft_train_on_completion_only=false, or take more steps"
)


class Reports(NamedTuple):
    """Callbacks for the rows of metrics: one row per step, one row per evaluation."""

    step: Callable[[Row], None]
    evaluation: Callable[[Row], None]  # for evaluations of the loss and of tasks
    sync: Callable[[], None]  # returns when all rows so far are on disk
    evaluations: Sequence[Row] = ()  # the evaluation rows of earlier processes
    unevaluated: bool = False  # whether the loss has not been evaluated since the last update of an earlier process
    untested: bool = False  # whether the evaluation tasks have not run since the last update of an earlier process
    profiler: Profiler | None = None
    during: Callable[[str], AbstractContextManager[None]] = lambda part: contextlib.nullcontext()  # `Timeline.during`
    waiting: Callable[[bool], None] = lambda begins: None  # called with True before a wait for a batch, False after
    times: Callable[[int, float, float, float], None] = lambda *times: None  # see `Stragglers.add`


# (state, number of updates, interrupted) -> a row with the scores of the evaluation tasks. The tasks stop, and the
# function returns None, as soon as `interrupted()` returns True.
Tasks = Callable[[Any, int, Callable[[], bool]], Row | None]


class End(NamedTuple):
    """The result of `fit`."""

    state: Any  # the final native train state
    signal: int  # the signal that ended the run early; 0 if the last update and evaluation were completed
    ends: Sequence[int]  # the model's end-of-text tokens (`About.ends`)


def fit(
    run: Run,
    compiled_step: Callable[..., Any] | None,
    start: Start,
    dataset: Dataset,
    reports: Reports,
    manager: CheckpointManager | None = None,
    source: Callable[[Run, Dataset, Start], AbstractContextManager[BatchSource]] | None = None,
    tasks: Tasks | None = None,
) -> End:
    """Trains until `steps` updates are done. Evaluates and saves at the configured intervals.

    Args:
      run: from `training.build`.
      compiled_step: the result of `run.compile_on_leaves()`; may be None if `start` already contains all updates.
      start: the initial state; its buffers are donated.
      dataset: the rows for training and evaluation, and the tokenizer that is stored in checkpoints.
      reports: called once for each row, in order.
      manager: saves the checkpoints; None: no checkpoints are saved.
      source: opens the source of the batches for training and evaluation. By default the batches come from `dataset`,
        with the fields of next-token prediction.
      tasks: runs the evaluation tasks, every `eval_tasks_interval` updates and after the last update; None: there are
        no evaluation tasks.

    Raises:
      UserError: the first training or evaluation batch does not have the fields of the objective.
      RunStopped: a loss or gradient is not finite and the configuration requires a stop; an update is not finite; or no
        token in the batches of a new run or of an evaluation contributes to the loss.
    """
    steps = run.config.steps
    with Preemption(manager is not None) as preemption, (source or LoadedAhead)(run, dataset, start) as batches:
        loop = _Loop(run, start, dataset, batches, reports, manager, preemption, tasks)
        if not start.resumed:
            loop.save(initial=True)
        else:  # the previous process may have ended during an evaluation
            loop.evaluate_if_due(reports.unevaluated, reports.untested)
        while loop.done < steps:
            if preemption.requested and loop.done % batches.updates == 0:
                break
            taken = loop.taken(batches)
            if taken is None or (preemption.check(loop.done) and loop.done % batches.updates == 0):
                break
            loop.update(compiled_step, *taken)
            loop.evaluate_if_due()
            loop.save()
        loop.reader.flush()
        if not preemption.check(loop.done):
            loop.check_tokens()
        elif not loop.untrained:
            loop.save(force=True)
        if manager is not None:
            with reports.during(SAVE):
                manager.wait()  # a second SIGTERM must not end the process during the save that the first one requested
    whole = loop.done == steps and loop.evaluated
    return End(loop.state, 0 if whole else preemption.number, start.about.ends)


class _Loop:
    """The native train state after `done` updates, and the work between two updates."""

    def __init__(
        self,
        run: Run,
        start: Start,
        dataset: Dataset,
        batches: BatchSource,
        reports: Reports,
        manager: CheckpointManager | None,
        preemption: Preemption,
        tasks: Tasks | None,
    ):
        self._start = start._replace(state=None)
        self._structure: Any  # a PyTreeDef, whose stubs lack unflatten
        self._leaves, self._structure = jax.tree.flatten(start.state)
        self.done, self._position = start.updates, start.position
        self.evaluated = True  # False if a due evaluation was interrupted
        devices = list(run.mesh.devices.flat)
        read, memory = run.computation.read, lambda: memory_in_use(devices)
        self.reader = _Reader(reports.step, self._check_finite, read, memory, reports.times)
        self._run, self._dataset, self._reports, self._manager = run, dataset, reports, manager
        self._batches, self._preemption, self._unsaved = batches, preemption, run.base_names
        self._tasks, self._last_evaluation = tasks, dict[str, Any]()
        for row in reports.evaluations:
            self._keep_scores(row)

    @property
    def state(self) -> Any:
        """The native train state."""
        return self._structure.unflatten(self._leaves)

    def taken(self, batches: BatchSource) -> tuple[Batch, Position] | None:
        """Returns the next batch and the data position after it; None if interrupted. Saves the state if the source
        fails."""
        self._reports.waiting(True)
        with self._saved_if_it_fails():
            taken = batches.take(lambda: self.state, lambda: self._preemption.requested)
        self._reports.waiting(False)
        return taken

    @contextlib.contextmanager
    def _saved_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            if self.done > self._start.updates and self.done % self._batches.updates == 0:
                self.save(force=True)
            raise

    def update(self, compiled_step: Callable[..., Any] | None, batch: Batch, position: Position) -> None:
        """Dispatches a step on `batch` and reports the previous step. `position`: the data position after `batch`."""
        assert compiled_step is not None
        rows = len(batch["row"]) * share_of_rows(self._run.batch_shardings["row"], self._run.rows)["process_count"]
        if self.done == self._start.updates:
            check_batch(self._run, batch, rows)
        profiler = self._reports.profiler
        if profiler is not None and profiler.before(self.done, self.reader.flush):
            self.reader.restart_clock()
        with jax.profiler.StepTraceAnnotation("train", step_num=self.done):
            on_devices = placed(self._run, batch, rows)
            with jax.transfer_guard("disallow"):
                self._leaves, metrics = compiled_step(self._leaves, on_devices, self._start.frozen)
        self._position = position
        self.reader.push(self.done, metrics, self._batches.metrics, self._batches.waited)
        if profiler is not None and profiler.after(self.done, self.reader.flush):
            self.reader.restart_clock()
        self.done += 1

    def _check_finite(self, row: Row) -> None:
        batch = _batch_of(self._run, self._start, row["step"])
        check_finite(self._run.config, row, batch, lambda: names_not_finite(self._run, self.state))

    def evaluate_if_due(self, loss: bool = True, tasks: bool = True) -> None:
        """Runs the evaluations (held-out loss and tasks) that are due, unless a signal interrupts them."""
        config = self._run.config
        last, every = self.done == config.steps, config.eval_tasks_interval
        if loss and config.eval_interval > 0 and (last or not self.done % config.eval_interval):
            self._evaluate()
        if tasks and self._tasks is not None and (last or (every and not self.done % every)) and self.evaluated:
            self._evaluate_by_tasks(self._tasks)

    def _evaluate(self) -> None:
        step = self.done - 1
        self.reader.flush()
        batches, tokenizer = self._batches.held_out(lambda: self.state), self._dataset.tokenizer
        with self._saved_if_it_fails(), self._reports.during(EVALUATION):
            row = evaluate(self._run, self.state, batches, tokenizer, step, self._preemption, self._start.frozen)
        self.evaluated = row is not None
        if row is not None:
            self._reports.evaluation(row)
            self._keep_scores(row)
        self.reader.restart_clock()

    def _evaluate_by_tasks(self, tasks: Tasks) -> None:
        self.reader.flush()
        with self._saved_if_it_fails(), self._reports.during(EVALUATION):
            row = tasks(self.state, self.done, lambda: self._preemption.requested)
        self.evaluated = row is not None
        if row is not None:
            self._reports.evaluation(row)
            self._keep_scores(row)
        self.reader.restart_clock()

    def _keep_scores(self, row: Row) -> None:
        """Merges `row` with an earlier evaluation of the same step, and passes the result to the checkpoint manager."""
        before = self._last_evaluation
        self._last_evaluation = (before if before.get("step") == row["step"] else {}) | row
        if self._manager is not None:
            self._manager.evaluated(row["step"] + 1, self._last_evaluation)

    def save(self, *, initial: bool = False, force: bool = False) -> None:
        """Saves the state if a checkpoint is due."""
        config, dataset = self._run.config, self._dataset
        with contextlib.ExitStack() as during:
            maybe_save_checkpoint(
                self._manager,
                self.state,
                self.done,
                config=config,
                codec=self._run.codec,
                sidecar=lambda: Sidecar(
                    to_yaml(config),
                    self._position,
                    dataset.fingerprint,
                    {**dataset.tokenizer_files, **self._start.about.files()},
                    base=self._start.base,
                    reference=self._start.reference,
                ),
                unsaved=self._unsaved,
                initial=initial,
                force=force,
                before=lambda: self._before_saving(during),
            )

    @property
    def untrained(self) -> bool:
        """Whether a new run has made no update, because no token so far contributed to the loss."""
        resumed = self._start.resumed and self._start.updates > 0
        return self.done > self._start.updates and not resumed and not self.reader.tokens

    def check_tokens(self) -> None:
        """Stops a run if it is `untrained`, without saving a checkpoint that would mark the run as finished."""
        if self.untrained:
            raise RunStopped(_NO_TOKENS.format(batches=counted(self.done - self._start.updates, "batch", "batches")))

    def _before_saving(self, during: contextlib.ExitStack) -> Mapping[str, float]:
        self.reader.flush()
        during.enter_context(self._reports.during(SAVE))
        self.check_tokens()
        from_first(self._reports.sync)
        row, best = self._last_evaluation, self._run.config.keep_best_metric.partition(":")[2]
        if row.get("step") != self.done - 1:
            return {}
        return {name: row[name] for name in ("eval_loss", best) if name in row and math.isfinite(row[name])}


def evaluate(
    run: Run,
    state: Any,
    batches: Iterable[Batch],
    tokenizer: Tokenizer | None,
    step: int,
    preemption: Preemption | None = None,
    frozen: Any = (),
) -> Row | None:
    """Returns a row of metrics over the evaluation batches; None if preempted.

    `batches`: this process's share of the batches. `tokenizer`: provides the number of bytes of each token. `frozen`:
    see `Start`.
    """
    started = time.perf_counter()
    lengths = np.zeros(run.config.vocab_size, np.int32)  # without a tokenizer, bytes are not counted
    if tokenizer is not None and tokenizer.bytes_per_token is not None:
        known = tokenizer.bytes_per_token[: len(lengths)]
        lengths[: len(known)] = known
    table = replicate(lengths, run.replicated)

    def sums() -> Iterable[dict[str, Any]]:
        waiting = None
        for count, batch in enumerate(batches):
            if preemption is not None and preemption.requested:
                return
            if not count:
                check_batch(run, batch, run.eval_rows)
            on_devices = placed(run, batch, run.eval_rows)
            with jax.transfer_guard("disallow"):
                current = run.eval_step(state, on_devices, frozen, table)
            if waiting is not None:
                yield jax.device_get(waiting)
            waiting = current
        if waiting is not None:
            yield jax.device_get(waiting)

    found = list(sums())
    if preemption is not None and preemption.requested:
        return None
    return {"step": step, **summarize(found), "eval_time": time.perf_counter() - started}


def _batch_of(run: Run, start: Start, step: int) -> str:
    """Returns a description of a step's batch, for messages."""
    rows, before = run.rows, 0 if run.config.reuse_example_batch else step - start.updates
    first = (start.position or {"row": 0}).get("row")
    if first is None:
        return f"batch {before + 1} of the stream since this process started"
    first += before * rows
    return f"rows {first} to {first + rows - 1} of the training order"


class _Reader:
    """Converts metrics on the device to rows on the host, one step late."""

    def __init__(
        self,
        report: Callable[[Row], None],
        check: Callable[[Row], None],
        read: Callable[[Any, int], dict[str, Any]],
        memory: Callable[[], int | None],
        times: Callable[[int, float, float, float], None],
    ):
        """Passes every row to `report` and then to `check`. `read`: see `Computation.read`. `memory`: returns
        `memory_in_use` of the devices.

        `times`: see `Reports`.
        """
        self._report, self._check, self._read, self._memory, self._times = report, check, read, memory, times
        self._waiting: tuple[int, Any, Mapping[str, float]] | None = None
        self._waited = 0.0
        self.tokens = 0  # the number of tokens that contributed to the loss, in all rows so far
        self.restart_clock()

    def restart_clock(self) -> None:
        """Restarts the clock for the time of the next step."""
        self._clock = time.perf_counter()
        self._waited_before = self._waited

    def push(self, step: int, metrics: Any, of_batch: Mapping[str, float], waited: float) -> None:
        """Stores the metrics of the step that was just dispatched (`metrics`) and of its batch (`of_batch`). Reports
        the previous step.

        `waited`: total seconds that the loop has waited for batches so far.
        """
        self._waited = waited
        self.flush()
        self._waiting = step, metrics, of_batch

    def flush(self) -> None:
        """Waits for the last dispatched step, if it has not been reported yet, and reports it."""
        if self._waiting is None:
            return
        step, metrics, of_batch = self._waiting
        self._waiting = None
        began = time.perf_counter()
        values = {
            name: value.item() if value.ndim == 0 else value.tolist()
            for name, value in self._read(metrics, step).items()
        }
        now = time.perf_counter()
        elapsed, waited = now - self._clock, self._waited - self._waited_before
        own = elapsed - (now - began)
        self.restart_clock()
        row = {
            "step": step,
            **values,
            **of_batch,
            "step_time": elapsed,
            "tokens_per_second": values["tokens"] / elapsed,
            "data_wait": min(1.0, waited / elapsed),
        }
        if (memory := self._memory()) is not None:
            row["memory"] = memory
        self.tokens += row["tokens"]
        finite = row.pop("finite")
        self._report(row)
        self._times(step, own, waited, elapsed)
        self._check(row | {"finite": finite})

"""The loop. The device never waits for the host: metrics of a step are read after the next one was dispatched."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.checkpoint import Beside, CheckpointManager, maybe_save_checkpoint
from trainer.config import RunStopped, to_yaml
from trainer.data import Batch, Dataset, Loader, eval_batches, train_batch
from trainer.runtime.place import place
from trainer.runtime.preemption import Preemption
from trainer.training.build import Run
from trainer.training.evaluate import summarize
from trainer.training.start import Start

Row = dict[str, Any]


class Reports(NamedTuple):
    """Who hears of what happens: a row per step, and a row per evaluation."""

    step: Callable[[Row], None]
    evaluation: Callable[[Row], None]
    sync: Callable[[], None]  # returns when all rows so far are on the disk
    evaluated: frozenset[int] = frozenset()  # steps whose evaluation an earlier process reported


class End(NamedTuple):
    """The last native train state, and whether a signal ended the run before its last step."""

    state: Any
    preempted: bool


def fit(
    run: Run,
    compiled_step: Callable[..., Any],
    start: Start,
    dataset: Dataset,
    reports: Reports,
    manager: CheckpointManager | None = None,
) -> End:
    """Train to `steps` updates, evaluating and saving on the way.

    Args:
      run: from `build`.
      compiled_step: `run.compile()`.
      start: where to begin; the buffers of its state are donated.
      dataset: rows to train and to evaluate on.
      reports: called once for each row, in order.
      manager: takes the checkpoints.

    Raises:
      RunStopped: a loss or gradient is not finite, and the configuration says to stop then.
    """
    config, state = run.config, start.state
    reader = _Reader(reports.step, lambda row: _check_finite(config, row, run.rows))
    last_evaluation: Row = {}

    def evaluate_here(done: int) -> None:
        reader.flush()
        row = evaluate(run, state, dataset, done - 1, preemption)
        if row is not None:
            last_evaluation.update(row)
            reports.evaluation(row)
        reader.restart_clock()

    def save(done: int, force: bool = False) -> None:
        def before() -> Mapping[str, float]:
            reader.flush()
            reports.sync()
            return {"eval_loss": last_evaluation["eval_loss"]} if last_evaluation.get("step") == done - 1 else {}

        maybe_save_checkpoint(
            manager,
            state,
            done,
            config=config,
            backend=run.backend,
            beside=lambda: Beside(to_yaml(config), done, dataset.fingerprint, dataset.tokenizer_files()),
            force=force,
            before=before,
        )

    def load(step: int) -> Batch:
        return train_batch(
            dataset.train,
            step,
            run.rows,
            seed=config.data_shuffle_seed,
            shuffle=config.enable_data_shuffling,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    done = start.updates
    with Preemption() as preemption, Loader(load, start.updates, config.steps) as batches:
        if start.resumed and _evaluates(config, done) and done - 1 not in reports.evaluated:
            evaluate_here(done)  # the process before was ended within this evaluation
        elif not start.resumed:
            save(done)
        with jax.transfer_guard("disallow"):
            for batch in batches:
                if preemption.requested:
                    break
                state, metrics = compiled_step(state, place(batch, run.batch_shardings))
                reader.push(done, metrics)
                done += 1
                if _evaluates(config, done):
                    evaluate_here(done)
                save(done)
            reader.flush()
        if preemption.requested:
            save(done, force=True)
    return End(state, preempted=preemption.requested and done < config.steps)


def _evaluates(config, done: int) -> bool:
    return config.eval_interval > 0 and done > 0 and (done % config.eval_interval == 0 or done == config.steps)


def evaluate(run: Run, state: Any, dataset: Dataset, step: int, preemption: Preemption | None = None) -> Row | None:
    """A row of metrics over the held-out rows, or over the first `eval_steps` batches of them; None if preempted."""
    started = time.perf_counter()
    lengths = np.zeros(run.config.vocab_size, np.int32)  # of no text: there are no bytes to count
    if dataset.tokenizer is not None:
        lengths[: dataset.tokenizer.vocab_size] = dataset.tokenizer.bytes_per_token
    table = jax.device_put(lengths, run.replicated)

    def sums() -> Iterable[dict[str, np.ndarray]]:
        waiting = None
        share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        for batch in eval_batches(dataset.evaluation, run.eval_rows, run.config.eval_steps, **share):
            if preemption is not None and preemption.requested:
                return
            current = run.eval_step(state, place(batch, run.batch_shardings), table)
            if waiting is not None:
                yield jax.device_get(waiting)
            waiting = current
        if waiting is not None:
            yield jax.device_get(waiting)

    metrics = summarize(sums())
    if preemption is not None and preemption.requested:
        return None
    return {"step": step, **metrics, "eval_time": time.perf_counter() - started}


def _check_finite(config, row: Row, rows: int) -> None:
    values = {name: row[name] for name in ("loss", "grad_norm")}
    nan = config.abort_on_nan_loss and any(math.isnan(value) for value in values.values())
    inf = config.abort_on_inf_loss and any(math.isinf(value) for value in values.values())
    if nan or inf:
        step, key = row["step"], "abort_on_nan_loss" if nan else "abort_on_inf_loss"
        found = " and ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value))
        raise RunStopped(
            f"step {step}: {found}. Its batch is rows {step * rows} to {(step + 1) * rows - 1} of the training order "
            f"(data_shuffle_seed={config.data_shuffle_seed}). The update was left out, and the checkpoints are as they "
            f"were. Lower learning_rate, or set {key}=false to leave such updates out and go on"
        )


class _Reader:
    """Turns metrics on the device into rows on the host, one step late."""

    def __init__(self, report: Callable[[Row], None], check: Callable[[Row], None]):
        """Every row goes to `report` and then to `check`."""
        self._report, self._check = report, check
        self._waiting: tuple[int, Any] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """The next step's time counts from now."""
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: Any) -> None:
        """Take the metrics of a step that was just dispatched, and report those of the step before."""
        self.flush()
        self._waiting = step, metrics

    def flush(self) -> None:
        """Wait for the last step and report it."""
        if self._waiting is None:
            return
        step, metrics = self._waiting
        self._waiting = None
        values = {
            name: value.item() if value.ndim == 0 else value.tolist() for name, value in jax.device_get(metrics).items()
        }
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        row = {"step": step, **values, "step_time": elapsed, "tokens_per_second": values["tokens"] / elapsed}
        self._report(row)
        self._check(row)

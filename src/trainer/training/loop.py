"""The loop. The device never waits for the host: metrics of a step are read after the next one was dispatched."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.data import Dataset, Loader, eval_batches
from trainer.runtime import place
from trainer.training.build import Run
from trainer.training.evaluate import summarize

Row = dict[str, Any]


class Reports(NamedTuple):
    """Who hears of what happens: a row per step, and a row per evaluation."""

    step: Callable[[Row], None]
    evaluation: Callable[[Row], None]


def fit(run: Run, compiled_step: Callable[..., Any], state: Any, dataset: Dataset, reports: Reports) -> Any:
    """Train for `steps` updates, evaluating on the way; gives back the last native train state.

    Args:
      run: from `build`.
      compiled_step: `run.compile()`.
      state: from `run.init`; its buffers are donated.
      dataset: rows to train and to evaluate on.
      reports: called once for each row, in order.
    """
    config = run.config
    reader = _Reader(reports.step)

    place_of = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    stream = dataset.train_stream(rows=run.rows, **place_of)
    with Loader(stream, config.steps) as batches, jax.transfer_guard("disallow"):
        for step, (batch, _position) in enumerate(batches):
            state, metrics = compiled_step(state, place(batch, run.batch_shardings))
            reader.push(step, metrics, batches.waited)
            done = step + 1
            if config.eval_interval > 0 and (done % config.eval_interval == 0 or done == config.steps):
                reader.flush()
                reports.evaluation(evaluate(run, state, dataset, step))
                reader.restart_clock()
        reader.flush()
    return state


def evaluate(run: Run, state: Any, dataset: Dataset, step: int) -> Row:
    """A row of metrics over the held-out rows, or over the first `eval_steps` batches of them."""
    started = time.perf_counter()
    held_out = dataset.evaluation
    assert held_out is not None, "eval_interval is above 0"
    lengths = np.zeros(run.config.vocab_size, np.int32)  # of no text: there are no bytes to count
    if dataset.tokenizer is not None and dataset.tokenizer.bytes_per_token is not None:
        lengths[: dataset.tokenizer.vocab_size] = dataset.tokenizer.bytes_per_token
    table = jax.device_put(lengths, run.replicated)

    def sums() -> Iterable[dict[str, np.ndarray]]:
        waiting = None
        share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        for batch in eval_batches(held_out, run.eval_rows, run.config.eval_steps, **share):
            current = run.eval_step(state, place(batch, run.batch_shardings), table)
            if waiting is not None:
                yield jax.device_get(waiting)
            waiting = current
        if waiting is not None:
            yield jax.device_get(waiting)

    return {"step": step, **summarize(sums()), "eval_time": time.perf_counter() - started}


class _Reader:
    """Turns metrics on the device into rows on the host, one step late."""

    def __init__(self, report: Callable[[Row], None]):
        self._report = report
        self._waiting: tuple[int, Any] | None = None
        self._waited = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        """The next step's time counts from now."""
        self._clock = time.perf_counter()
        self._waited_before = self._waited

    def push(self, step: int, metrics: Any, waited: float) -> None:
        """Take the metrics of a step that was just dispatched, and report those of the step before.

        `waited`: seconds that the loop has waited for batches so far.
        """
        self._waited = waited
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
        elapsed, waited = now - self._clock, self._waited - self._waited_before
        self.restart_clock()
        tokens = values.pop("tokens")
        self._report(
            {
                "step": step,
                **values,
                "tokens": tokens,
                "step_time": elapsed,
                "tokens_per_second": tokens / elapsed,
                "data_wait": min(1.0, waited / elapsed),
            }
        )

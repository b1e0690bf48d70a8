"""The data that a report shows for one run, collected row by row."""

import math
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.errors import UserError
from trainer.config.saved import read_saved
from trainer.observe.goodput import GOODPUT_FILE, Goodput, read_goodput
from trainer.observe.lines import has_loss, last_measured
from trainer.observe.metrics import METRICS_FILE, read_rows
from trainer.observe.rollouts import newest_rollouts
from trainer.observe.rundir import CONFIG_FILE, SAMPLES_FILE
from trainer.observe.series import Series, number
from trainer.observe.starts import STARTS_FILE, read_starts
from trainer.observe.text import rate, short_time
from trainer.runtime.folders import check_folder


class Record:
    """The data of a run. It uses 16 bytes per step for the step's time and speed, in addition to the bytes of
    `goodput`.

    Attributes:
      name: the name of the run's folder.
      config: the resolved configuration; empty if config.yml is missing.
      starts: the entries of starts.json, which describe how each process started.
      samples: the rows of samples.jsonl.
      rollouts: the completions of the newest round of rollouts; see `observe.rollouts`.
      goodput: how the run spent its time.
      series: the values of each field of metrics.jsonl.
      step_times: the step times in seconds.
      sums: "tokens": the number of tokens that contributed to the loss; "skipped": the number of skipped updates.
    """

    def __init__(self, name: str, config: Mapping[str, Any], starts: list[dict[str, Any]]):
        self.name, self.config, self.starts = name, config, starts
        self.samples: list[dict[str, Any]] = []
        self.rollouts: list[dict[str, Any]] = []
        self.goodput = Goodput()
        self.series: dict[str, Series] = {}
        self.step_times = array("d")
        self._rates = array("d")
        self.sums = {"tokens": 0.0, "skipped": 0.0}
        self._last: Mapping[str, Any] = {}  # the row of the last step
        self._evaluated: Mapping[str, Any] = {}  # the row of the last evaluation
        self._evaluations: list[tuple[float, int]] = []  # (loss, step) of the last evaluation and of the best one
        self._unlike_loss: set[str] = set()

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the next row of metrics.jsonl."""
        step, loss = row["step"], row.get("loss")
        for field, value in row.items():
            if field == "step":
                continue
            if field not in self.series:
                self.series[field] = Series()
            self.series[field].add(step, value)
            if field not in self._unlike_loss and ("loss" not in row or not _same(value, loss)):
                self._unlike_loss.add(field)
        for field, sums in self.sums.items():
            if math.isfinite(latest := number(row.get(field))):
                self.sums[field] = sums + latest
        for field, values in (("step_time", self.step_times), ("tokens_per_second", self._rates)):
            if math.isfinite(latest := number(row.get(field))):
                values.append(latest)
        if "loss" in row:
            self._last = row
        if "eval_loss" in row:
            self._evaluated = row
            newest = number(row["eval_loss"]), step
            best = [evaluation for evaluation in (*self._evaluations[1:], newest) if math.isfinite(evaluation[0])]
            self._evaluations = [newest, *([min(best)] if best else [])]

    def is_loss(self, field: str) -> bool:
        """Returns whether `field` equals the loss in every row. It does if it is the only term of the loss."""
        counts = [self.series[name].count if name in self.series else 0 for name in (field, "loss")]
        return counts[0] == counts[1] and field not in self._unlike_loss

    def facts(self) -> dict[str, str]:
        """Returns the lines of the run's summary: a dict from labels to texts."""
        total = self.config.get("steps")
        done = self._last["step"] + 1 if self._last else 0
        lines = {"updates": f"{done:,}" + (f" of {total:,}" if isinstance(total, int) and total else "")}
        if not self._last:
            return lines
        lines |= last_measured(self._last, self._evaluated)
        lines["trained tokens"] = f"{self.sums['tokens']:,.0f}"
        if self.step_times and self._rates:
            speed, each = float(np.median(self._rates)), float(np.median(self.step_times))
            lines["speed"] = f"{rate(speed)}, {short_time(each)} per step (medians)"
        if has_loss(self._last):
            lines["last loss"] = f"{number(self._last['loss']):.4f}"
        if self.sums["skipped"]:
            lines["skipped updates"] = f"{self.sums['skipped']:,.0f}"
        evaluations = self._evaluations if has_loss(self._last) else []
        for name, (loss, step) in zip(("last evaluation", "best evaluation"), evaluations, strict=False):
            lines[name] = f"{loss:.4f} after step {step}"
        if resumed := self.resumed_at():
            shown = ", ".join(f"{step:,}" for step in resumed[-5:])
            lines["resumed"] = f"{len(resumed)} times, " if len(resumed) > 1 else ""
            lines["resumed"] += f"{'last ' if len(resumed) > 5 else ''}before step {shown}"
        return lines

    def resumed_at(self) -> list[int]:
        """Returns the step at which each process except the first began."""
        return [start["step"] for start in self.starts[1:]]


def read_run(folder: Path) -> Record:
    """Returns the record of a run.

    Raises:
      UserError: the folder has no metrics.jsonl, or one of its files is damaged.
    """
    metrics = folder / METRICS_FILE
    check_folder(folder, (METRICS_FILE, CONFIG_FILE, SAMPLES_FILE, STARTS_FILE, GOODPUT_FILE))
    if not metrics.is_file():
        raise UserError(
            f"{folder} is not the folder of a run: it has no {METRICS_FILE}; give base_output_directory/run_name"
        )
    return begun(folder, read_rows(metrics))


def begun(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Record:
    """Returns the record of the run in `folder`, given `rows`, the rows of the run's metrics.jsonl.

    Raises:
      UserError: one of the run's other files is damaged.
    """
    config, samples = folder / CONFIG_FILE, folder / SAMPLES_FILE
    text = config.read_bytes().decode("utf-8", "replace") if config.is_file() else ""
    saved = read_saved(text, str(config)) if text else {}
    record = Record(folder.resolve().name, saved, read_starts(folder / STARTS_FILE))
    record.samples = read_rows(samples) if samples.is_file() else []
    record.rollouts = newest_rollouts(folder)
    record.goodput = read_goodput(folder)
    for row in rows:
        record.add(row)
    return record


def _same(value: Any, loss: Any) -> bool:
    both_nan = isinstance(value, float) and isinstance(loss, float) and math.isnan(value) and math.isnan(loss)
    return both_nan or (type(value) is type(loss) and value == loss)

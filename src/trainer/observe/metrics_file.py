"""The file that the key metrics_file requests: the rows of metrics.jsonl with MaxText's field names."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.observe.appended import set_aside
from trainer.observe.lines import Work
from trainer.observe.metrics import TASKS_TIME, MetricsWriter, read_rows
from trainer.observe.rundir import OWN_FILES
from trainer.observe.text import perplexity
from trainer.runtime.storage import why_not_writable


def maxtext_row(row: Mapping[str, Any], work: Work, clipping_threshold: float, run_name: str) -> dict[str, float | str]:
    """Returns a row of metrics.jsonl in the format of MaxText's `metrics_file`, in which all numbers are floats.

    Args:
      row: a row of a step, of an evaluation, or of an evaluation by tasks.
      work: the work of one step.
      clipping_threshold: the gradient norm above which gradients are clipped; 0: no clipping.
      run_name: the name of the run, a field of each row.
    """
    ends: dict[str, float | str] = {"step": float(row["step"]), "run_name": run_name}
    if "eval_loss" in row:
        return {
            "eval/avg_loss": row["eval_loss"],
            **_given("eval/avg_perplexity", row.get("eval_perplexity")),
            "eval/total_weights": float(row["eval_tokens"]),
            **_given("eval/avg_mtp_acceptance_rate_percent", row.get("eval_mtp_acceptance_rate"), 100),
            **_given("evaluation/dpo_reward_accuracy", row.get("eval_reward_accuracy")),
            **_given("evaluation/dpo_reward_margin", row.get("eval_reward_margin")),
            **ends,
        }
    if TASKS_TIME in row:  # MaxText has no fields for tasks, so these names are our own
        return {f"eval/{name}": float(value) for name, value in row.items() if name != "step"} | ends
    norm, seconds = row["grad_norm"], row["step_time"]
    tokens = work.tokens / work.devices
    nats = row.get("lm_loss")
    return {
        "learning/loss": row["loss"],
        **_given("learning/lm_loss", nats),
        **_given("learning/perplexity", None if nats is None else perplexity(nats)),
        "learning/z_loss": row.get("z_loss", 0.0),
        **_given("learning/mtp_loss", row.get("mtp_loss")),
        **_given("learning/moe_lb_loss", row.get("moe_lb_loss")),
        **_given("learning/reward_accuracy", row.get("reward_accuracy")),
        **_given("learning/reward_margin", row.get("reward_margin")),
        "learning/total_weights": float(row["tokens"]),
        "learning/grad_norm": clipping_threshold if 0 < clipping_threshold < norm else norm,
        "learning/raw_grad_norm": norm,
        "learning/current_learning_rate": row["learning_rate"],
        **_given("learning/max_logits", row.get("max_logit")),
        "perf/step_time_seconds": seconds,
        "perf/per_device_tflops": work.flops_per_token * tokens / 1e12,
        "perf/per_device_tflops_per_sec": work.flops_per_second(seconds) / 1e12,
        "perf/per_device_tokens": tokens,
        "perf/per_device_tokens_per_sec": work.tokens_per_second(seconds),
        **_of_islands(row),
        **ends,
    }


def _of_islands(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the fields that DiLoCo adds to a row. MaxText has no fields for DiLoCo, so these names are our own."""
    values = {f"diloco/{name}": row[name] for name in ("outer_grad_norm", "island_cosine") if name in row}
    for name, what in {"island_losses": "loss", "island_distance": "distance"}.items():
        values |= {f"diloco/island_{n}_{what}": value for n, value in enumerate(row.get(name, ()))}
    return values


def _given(name: str, value: float | None, scale: float = 1) -> dict[str, float]:
    return {} if value is None else {name: scale * value}


class MetricsFile:
    """The file at the path in the key `metrics_file`.

    A resumed run keeps its rows from before the checkpoint. If an existing file contains the metrics of another run, it
    is renamed to the first free name of PATH.1, PATH.2, ...
    """

    def __init__(self, path: str, run_dir: Path, run_name: str):
        """Checks that the file is writable, without creating anything.

        Raises:
          UserError: the file is not writable, is one of the files that the run writes in `run_dir`, or contains
            anything other than metrics in this format.
        """
        self.path, self._run_name = Path(os.path.realpath(os.path.expanduser(path))), run_name
        if self.path in [Path(os.path.realpath(run_dir / name)) for name in OWN_FILES]:
            raise UserError(f"metrics_file={path}: the run writes that file itself; choose another path")
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"metrics_file={path} exists and is not a file; choose another path")
        if why := why_not_writable(self.path.parent):
            raise _unwritable(path, why)
        self._begins, rows = b"", []
        try:
            if self.path.exists():
                with self.path.open("r+b") as file:
                    self._begins = file.read(1)
                rows = read_rows(self.path)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from error
        except UserError as error:
            raise _foreign(path) from error
        # Rows without run_name are in another format, such as that of metrics.jsonl.
        if self._begins not in (b"", b"{") or not all("run_name" in row for row in rows):
            raise _foreign(path)
        self._own = bool(rows) and all(row["run_name"] == run_name for row in rows)

    def open(
        self,
        updates: int,
        *,
        resumed: bool,
        say: Callable[[str], None],
        resumes: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> MetricsWriter:
        """Returns a writer for rows from step `updates` on. Calls `say` if a file of another run was renamed.

        `resumed`: whether the run is resumed. If so, existing rows with the run's name belong to it.
        `resumes`, `check`: see `MetricsWriter`.

        Raises:
          UserError: the file's parent folder cannot be created.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(str(self.path), error.strerror or str(error)) from error
        if self._begins and not (resumed and self._own):
            say(f"{self.path} contained metrics of another run; moved to {set_aside(self.path)}")
        return MetricsWriter(self.path.parent, updates, self.path.name, resumes=resumes, say=say, check=check)


def _unwritable(path: str, why: str) -> UserError:
    return UserError(f"metrics_file={path}: cannot be written: {why}; choose a file in a writable folder")


def _foreign(path: str) -> UserError:
    return UserError(f"metrics_file={path} exists but does not contain metrics in this format; choose another path")

"""The warning about an evaluation without the metric that selects checkpoints."""

import pytest

from trainer.config.keys import Config
from trainer.training.reports import lacks_best

LOSS = {"step": 1, "eval_loss": 2.0, "eval_bits_per_byte": 1.0, "eval_time": 0.1}
TASKS = {"step": 1, "sums/exact_match": 0.5, "sums/samples": 4, "eval_tasks_failed": 0, "eval_tasks_time": 0.1}


@pytest.mark.parametrize(
    ("metric", "row", "there"),
    [
        ("min:eval_los", LOSS, "eval_loss, eval_bits_per_byte"),
        ("max:sums/exact", TASKS, "sums/exact_match"),
        ("min:eval_loss", LOSS, None),
        ("min:eval_loss", TASKS, None),
        ("max:sums/exact_match", LOSS, None),
        ("max:sums/exact", TASKS | {"eval_tasks_failed": 1}, None),
    ],
)
def test_an_evaluation_without_the_metric_that_keeps_checkpoints_is_said(metric, row, there):
    said = lacks_best(row, Config({"keep_best_checkpoints": 1, "keep_best_metric": metric}))
    assert said == (there and f"warning: keep_best_metric={metric}: the evaluation has only {there}")

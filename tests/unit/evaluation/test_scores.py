"""Scores, their standard errors, and the choice of the best checkpoint by a score."""

import math

import numpy as np
import pytest
from manager_cases import settings

from trainer.checkpoint.retention import standing
from trainer.evaluation.scores import Result, fields, mean, ratio, table


def test_the_error_of_a_mean_is_that_of_its_samples():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    score = mean("accuracy", values)
    assert (score.value, score.samples) == (0.6, 5)
    assert score.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))
    assert mean("accuracy", [1.0]).error is None


def test_the_error_of_a_ratio_is_about_that_of_a_resampling():
    rng = np.random.default_rng(0)
    weights = rng.integers(5, 50, 400).astype(float)
    totals = weights * rng.normal(2, 0.5, 400)
    picks = rng.integers(0, 400, (4000, 400))
    resampled = totals[picks].sum(1) / weights[picks].sum(1)
    score = ratio("loss", totals.tolist(), weights.tolist())
    assert score.value == pytest.approx(totals.sum() / weights.sum())
    assert score.error == pytest.approx(resampled.std(), rel=0.05)


def test_scores_are_fields_of_a_row_and_lines_of_a_table():
    results = [Result("a", [mean("accuracy", [1.0, 0.0])], []), Result("b", [mean("score", [3.0])], [])]
    assert fields(results) == {
        "a/accuracy": 0.5,
        "a/accuracy_stderr": 0.5,
        "a/samples": 2,
        "b/score": 3.0,
        "b/samples": 1,
    }
    head, first, second = table(results).splitlines()
    assert head.split() == ["task", "metric", "value", "standard", "error", "samples"]
    assert first.split() == ["a", "accuracy", "0.5000", "0.5000", "2"]
    assert second.split() == ["b", "score", "3.0000", "unknown", "1"]
    name = "a_task_of_forty_characters_in_lm_eval_48"
    wide = table([Result(name, [mean("exact_match_flexible-extract", [1.0, 0.0])], []), *results]).splitlines()
    assert max(map(len, wide)) <= 80
    assert [line.split()[0] for line in wide] == [
        "metric",
        name,
        "exact_match_flexible-extract",
        "a",
        "accuracy",
        "b",
    ] + ["score"]
    assert len({len(line) for line in wide if line.startswith(" ")}) == 1


def test_the_best_checkpoint_is_that_of_a_task():
    row = {"step": 3, "eval_loss": 2.0, "a/accuracy": 0.25, "b/score": math.nan}
    assert standing(row, settings()) == 2.0
    assert standing(row, settings(keep_best_metric="max:a/accuracy")) == -0.25
    assert standing(row, settings(keep_best_metric="min:a/accuracy")) == 0.25
    assert standing(row, settings(keep_best_metric="max:b/score")) is None
    assert standing(row, settings(keep_best_metric="max:c/score")) is None

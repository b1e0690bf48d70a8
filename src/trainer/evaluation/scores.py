"""Scores of tasks, each with its standard error and its number of samples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_COLUMNS = ("metric", "value", "standard error", "samples")
_WIDTH = 80  # the width of a terminal


class Score(NamedTuple):
    """The value of a metric.

    Attributes:
      error: the standard error; None if it is unknown, as for a single sample.
      samples: the number of questions or texts.
    """

    metric: str
    value: float
    error: float | None
    samples: int


class Result(NamedTuple):
    """The result of a task.

    Attributes:
      samples: a row for each question or text, with the model's input and its answer.
    """

    task: str
    scores: Sequence[Score]
    samples: Sequence[Mapping[str, Any]]


def mean(metric: str, values: Sequence[float]) -> Score:
    """Returns the mean of `values`, one value per sample, with its standard error: the sample standard deviation over
    sqrt(n)."""
    return ratio(metric, values, [1.0] * len(values))


def ratio(metric: str, totals: Sequence[float], weights: Sequence[float]) -> Score:
    """Returns sum(totals) / sum(weights), with one total and one weight for each sample.

    The standard error is that of a ratio estimator, sqrt(n / (n - 1) * sum((total - value * weight)^2)) / sum(weights),
    because the n samples are independent, but the items that a sample's weight counts, such as tokens, are not.
    """
    count, weight = len(totals), math.fsum(weights)
    value = math.fsum(totals) / weight
    error = None
    if count > 1:
        squares = math.fsum((t - value * w) ** 2 for t, w in zip(totals, weights, strict=True))
        error = math.sqrt(count / (count - 1) * squares) / weight
    return Score(metric, value, error, count)


def fields(results: Sequence[Result]) -> dict[str, float | int]:
    """Returns the scores as fields of metrics.jsonl: TASK/METRIC, TASK/METRIC_stderr and TASK/samples."""
    found: dict[str, float | int] = {}
    for result in results:
        for score in result.scores:
            found[f"{result.task}/{score.metric}"] = score.value
            if score.error is not None:
                found[f"{result.task}/{score.metric}_stderr"] = score.error
        if result.scores:
            found[f"{result.task}/samples"] = max(score.samples for score in result.scores)
    return found


def table(results: Sequence[Result]) -> str:
    """Returns the scores as lines of aligned columns. If the lines are wider than a terminal, task names get separate
    lines."""
    rows = [("task", *_COLUMNS), *((result.task, *_cells(score)) for result in results for score in result.scores)]
    lines = _aligned(rows, words=2)
    if max(map(len, lines)) <= _WIDTH:
        return "\n".join(lines)
    header, *rest = _aligned([_COLUMNS, *(_cells(score) for result in results for score in result.scores)], words=1)
    below = iter(rest)
    lines = [f"  {header}"]
    for result in results:
        lines += [result.task] if result.scores else []
        lines += [f"  {next(below)}" for _ in result.scores]
    return "\n".join(lines)


def _cells(score: Score) -> tuple[str, ...]:
    error = "unknown" if score.error is None else f"{score.error:.4f}"
    return score.metric, f"{score.value:.4f}", error, f"{score.samples:,}"


def _aligned(rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Returns `rows` as lines of aligned columns. The first `words` columns are left-aligned, the others
    right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(w) if i < words else cell.rjust(w) for i, (cell, w) in enumerate(cells))

    return list(map(line, rows))

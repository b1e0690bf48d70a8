"""Selects the checkpoints to keep."""

import math
from collections.abc import Mapping
from typing import Any

from trainer.config.keys import Config


def standing(metrics: Mapping[str, Any], config: Config) -> float | None:
    """Returns the value in `metrics` of the metric that keep_best_metric names. If keep_best_metric begins with "max:",
    negates the value, so that lower is always better. Returns None if the value is absent or not finite."""
    direction, _, name = config.keep_best_metric.partition(":")
    value = metrics.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(-value if direction == "max" else value)


def expired(losses: Mapping[int, float | None], config: Config) -> list[int]:
    """Returns the checkpoints that the configuration does not keep, as numbers of updates, the oldest first.

    Args:
      losses: the `standing` of each checkpoint, by its number of updates; None for a checkpoint that was not evaluated.
      config: specifies the checkpoints to keep: the newest `max_num_checkpoints_to_keep` (None: all), those whose
        number of updates is a multiple of `checkpoint_keep_period`, and the `keep_best_checkpoints` checkpoints with
        the lowest standing.
    """
    if config.max_num_checkpoints_to_keep is None:
        return []
    updates = sorted(losses)
    kept = set(updates[-config.max_num_checkpoints_to_keep :])
    if config.checkpoint_keep_period:
        kept.update(number for number in updates if number % config.checkpoint_keep_period == 0)
    evaluated = [(loss, number) for number, loss in losses.items() if loss is not None]
    kept.update(number for _, number in sorted(evaluated)[: config.keep_best_checkpoints])
    return [number for number in updates if number not in kept]

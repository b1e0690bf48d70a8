"""Moves the metrics of a step from the devices to the host."""

from collections.abc import Mapping
from typing import Any

import jax

from trainer.config.keys import Config
from trainer.training.parameter_metrics import is_due


def read_metrics(config: Config, metrics: Mapping[str, jax.Array], step: int) -> dict[str, Any]:
    """Returns the metrics of step `step` as NumPy arrays, by name."""
    return jax.device_get(due(config, metrics, step))


def due(config: Config, metrics: Mapping[str, jax.Array], step: int) -> dict[str, jax.Array]:
    """Returns `metrics` without the parameter metrics that step `step` does not compute
    (`parameter_metrics_period`)."""
    return {name: value for name, value in metrics.items() if is_due(config.parameter_metrics_period, step, name)}

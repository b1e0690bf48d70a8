"""From a configuration to its objective."""

from typing import Any

from trainer.objectives.base import Objective
from trainer.objectives.next_token import NextToken


def make_objective(config, model: Any) -> Objective:
    """The objective of `config`, resolved, for `model` (`backends.Model`)."""
    return NextToken(model.apply, config.z_loss_multiplier, config.label_smoothing)

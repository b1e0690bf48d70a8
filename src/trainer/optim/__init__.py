"""Optimizers, learning-rate schedules and update rules, as functions of the dict of canonical names."""

from trainer.optim.optimizer import make_optimizer, trainable
from trainer.optim.rounding import applied
from trainer.optim.rules import Rule, Seen, any_due, apply_rules, observed, with_rules
from trainer.optim.schedule import make_schedule, on_schedule, place_on_schedule

__all__ = [
    "Rule",
    "Seen",
    "any_due",
    "applied",
    "apply_rules",
    "make_optimizer",
    "make_schedule",
    "observed",
    "on_schedule",
    "place_on_schedule",
    "trainable",
    "with_rules",
]

"""Optimizers, learning-rate schedules and update rules, as functions of the dict of canonical names."""

from trainer.optim.optimizer import make_optimizer, trainable
from trainer.optim.rules import Rule, any_due, apply_rules, with_rules
from trainer.optim.schedule import make_schedule

__all__ = ["Rule", "any_due", "apply_rules", "make_optimizer", "make_schedule", "trainable", "with_rules"]

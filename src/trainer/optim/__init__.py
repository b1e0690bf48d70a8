"""Optimizers and learning-rate schedules, as functions of the dict of canonical names."""

from trainer.optim.optimizer import make_optimizer, trainable
from trainer.optim.schedule import make_schedule

__all__ = ["make_optimizer", "make_schedule", "trainable"]

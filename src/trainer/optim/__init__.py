"""Optimizers and learning-rate schedules, as functions of the dict of canonical names."""

from trainer.optim.optimizer import check_masks, make_optimizer, trainable
from trainer.optim.schedule import make_schedule

__all__ = ["check_masks", "make_optimizer", "make_schedule", "trainable"]

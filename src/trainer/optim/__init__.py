"""Optimizers, learning-rate schedules and update rules, over the dict of parameters by canonical name."""

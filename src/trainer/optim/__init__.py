"""Optimizers, learning-rate schedules and update rules, which operate on a dict of parameters by canonical name."""

"""Optimizers, learning-rate schedules and update rules, as functions of the dict of canonical names."""

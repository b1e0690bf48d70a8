"""Evaluates models on tasks: a checkpoint, or the current parameters of a training run."""

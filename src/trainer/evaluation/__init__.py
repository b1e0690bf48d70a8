"""Evaluation on tasks, of a checkpoint or during a training run."""

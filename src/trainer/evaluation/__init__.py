"""Evaluation by tasks: of a checkpoint, or in a run, to which the entry points pass it."""

"""Evaluation by tasks: of a checkpoint, or in a run; the entry points pass it to the run."""

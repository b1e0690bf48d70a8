"""Ahead-of-time analysis of a compiled step: cost, memory, and an estimate of the step's time on a chip."""

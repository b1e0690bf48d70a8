"""Ahead-of-time analysis of a compiled step: its cost, its memory, and an estimate of its time on a chip."""

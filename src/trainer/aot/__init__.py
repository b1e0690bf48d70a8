"""Ahead of time: what a compiled step costs, what holds its memory, how long it would take on a chip."""

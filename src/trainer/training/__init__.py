"""Turns a configuration into a run: build, step, evaluate, loop."""

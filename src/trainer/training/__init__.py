"""Builds and runs the training of a configuration: build, step, evaluate, loop."""

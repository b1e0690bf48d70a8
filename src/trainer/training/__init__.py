"""Builds and runs the training of a configuration; see the modules build, step, evaluate and loop."""

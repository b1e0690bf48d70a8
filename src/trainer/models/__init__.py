"""Turns a configuration into a model. Only this package does that; layers and ops take plain arguments."""

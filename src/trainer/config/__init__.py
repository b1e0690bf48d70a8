"""Turns base.yml, presets and `key=value` arguments into one frozen configuration.

This package imports neither JAX nor Flax.
"""

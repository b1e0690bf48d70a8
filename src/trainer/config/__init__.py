"""Turns base.yml, presets and `key=value` into one frozen configuration. Importing it loads neither JAX nor Flax."""

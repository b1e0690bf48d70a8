"""Qwen3 with experts. Sizes: `qwen3-*-a*.yml` in config/models/."""

"""Qwen 3.5 and 3.6 with experts. Sizes: `qwen3.5-*-a*.yml` and `qwen3.6-*-a*.yml` in config/models/."""

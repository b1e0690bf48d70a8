"""Qwen3, dense. Sizes: `qwen3-*b.yml` in config/models/."""

"""Qwen3-Next, whose blocks Qwen 3.5 and 3.6 also use. Sizes: `qwen3-*next-*.yml` in config/models/."""

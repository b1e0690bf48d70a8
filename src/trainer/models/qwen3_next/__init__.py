"""Qwen3-Next, and the blocks of Qwen 3.5 and 3.6. Sizes: `qwen3-*next-*.yml` in config/models/."""

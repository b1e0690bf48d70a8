"""The dense models of Qwen 3.5 and 3.6. Sizes: `qwen3.5-*.yml` and `qwen3.6-*.yml` in config/models/."""

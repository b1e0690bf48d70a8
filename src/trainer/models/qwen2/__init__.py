"""The Qwen2 family. Sizes: `qwen2*.yml` in config/models/."""

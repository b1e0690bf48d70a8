"""The DeepSeek family. Sizes: `deepseek*.yml` and `kimi-k2*.yml` in config/models/."""

"""The dense models of Qwen3. Sizes: `qwen3-*b.yml` in config/models/."""

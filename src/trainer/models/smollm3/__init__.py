"""The SmolLM3 family. Sizes: `smollm3-*.yml` in config/models/."""

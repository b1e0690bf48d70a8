"""The Gemma 2 family. Sizes: `gemma2-*.yml` in config/models/."""

"""The Gemma 3 family. Sizes: `gemma3-*.yml` in config/models/."""

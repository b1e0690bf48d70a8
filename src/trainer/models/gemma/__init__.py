"""The Gemma family. Sizes: `gemma-*.yml` in config/models/."""

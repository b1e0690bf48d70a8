"""The Mistral family. Sizes: `mistral-*.yml` in config/models/."""

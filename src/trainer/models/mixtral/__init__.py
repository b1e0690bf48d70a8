"""The Mixtral family. Sizes: `mixtral-*.yml` in config/models/."""

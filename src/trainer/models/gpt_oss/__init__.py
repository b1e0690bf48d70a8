"""The gpt-oss family. Sizes: `gpt-oss-*.yml` in config/models/."""

"""The OLMo 2 family. Sizes: `olmo2-*.yml` in config/models/."""

"""The OLMo 3 family. Sizes: `olmo3-*.yml` in config/models/."""

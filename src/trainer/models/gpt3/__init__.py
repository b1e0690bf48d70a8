"""The GPT-3 family. Sizes: `gpt3-*.yml` in config/models/."""

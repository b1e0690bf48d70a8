"""The Llama family. Sizes: `llama*.yml` in config/models/."""

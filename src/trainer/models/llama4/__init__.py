"""The Llama 4 family, its text model. Sizes: `llama4-*.yml` in config/models/."""

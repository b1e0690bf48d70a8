"""The text model of Llama 4. Sizes: `llama4-*.yml` in config/models/."""

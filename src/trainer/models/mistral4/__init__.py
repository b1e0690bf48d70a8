"""The Mistral 4 family, its text model. Sizes: `mistral-small-4-*.yml` in config/models/."""

"""The text model of Mistral 4. Sizes: `mistral-small-4-*.yml` in config/models/."""

"""GLM 4.5, 4.6 and 4.7, which have experts. Sizes: `glm4.5-*.yml` in config/models/."""

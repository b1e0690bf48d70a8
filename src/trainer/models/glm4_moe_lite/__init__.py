"""GLM 4.7 Flash, which has latent attention. Sizes: `glm4.7-flash-*.yml` in config/models/."""

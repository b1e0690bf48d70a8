"""The GLM 4 family without experts. Sizes: `glm4-*.yml` in config/models/."""

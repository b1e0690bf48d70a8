"""The Phi 3 family, which includes Phi 4. Sizes: `phi3*.yml` and `phi4*.yml` in config/models/."""

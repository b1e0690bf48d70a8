"""The Phi 3 family, which Phi 4 belongs to. Sizes: `phi3*.yml` and `phi4*.yml` in config/models/."""

"""The Ministral 3 family. Sizes: `ministral3-*.yml` and `devstral-*.yml` in config/models/."""

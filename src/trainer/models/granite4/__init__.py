"""The models of Granite 4 without Mamba and without experts. Sizes: `granite4*.yml` in config/models/."""

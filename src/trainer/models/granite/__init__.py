"""The dense models of Granite 3. Sizes: `granite3*.yml` in config/models/."""

"""The models of Granite 3 with experts. Sizes: `granite3*-a*m.yml` in config/models/."""

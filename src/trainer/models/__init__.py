"""From a configuration to a model. Only this room does that; layers and ops take plain arguments."""

"""Granite 3 with experts, of which some are shared. It has no presets."""

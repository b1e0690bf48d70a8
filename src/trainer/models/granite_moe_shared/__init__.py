"""Granite 3 with routed and shared experts. It has no presets."""

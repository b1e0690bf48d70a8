"""Handles MaxText's keys and defaults, and copies of MaxText's base.yml."""

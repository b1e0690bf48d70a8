"""Converts commands of MaxText into commands of this trainer."""

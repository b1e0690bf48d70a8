"""A file for each capability: its keys, their checks, and under which other settings they have no effect."""

"""A file for each capability: its keys, their checks, and the other settings under which they have no effect."""

"""Parameters in this trainer's format."""

"""Parameters in this trainer's own format."""

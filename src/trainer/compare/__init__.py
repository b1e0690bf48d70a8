"""Compares two programs, a program with a record, or two checkpoints: where they first differ, and by how much."""

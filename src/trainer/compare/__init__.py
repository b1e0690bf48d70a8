"""Compares two programs, a program with a record of one, or two checkpoints: whether they are equal, where they first
differ, and by how much."""

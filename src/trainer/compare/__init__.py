"""Compares two programs, a program with a record, or two checkpoints: reports where and by how much they differ."""

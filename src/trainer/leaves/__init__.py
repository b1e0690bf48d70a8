"""The common parts of all checkpoints: named arrays that are read in parts, Orbax trees, and a model's metadata."""

"""The common parts of all checkpoints: named arrays read in parts, Orbax trees, and further data about a model."""

"""Common parts of all checkpoints: named arrays read part by part, Orbax trees, and further data about a model."""

"""MaxText's checkpoints, and its command-line arguments for a model."""

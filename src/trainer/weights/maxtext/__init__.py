"""MaxText's checkpoints, and what its command line says of a model."""

"""What all checkpoints have: named arrays read one part at a time, Orbax's trees, what a folder says of a model."""

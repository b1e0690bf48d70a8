"""The interface between the trainer and Flax's module systems, NNX and Linen.

A model implements one combination of the flags that select module systems: it initializes parameters and runs the
forward pass. The native train state of a model has the structure that its module system requires. A `StateCodec`, made
from a model and an optimizer, creates native train states and converts between native train states and `TrainTree`s.
All other code uses `TrainTree`s, so it does not depend on the combination.
"""

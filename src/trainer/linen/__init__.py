"""All Linen code: the decoder stack, the transformer, the bridges and the TrainState.

The math of a block is not in this package. It is written once, as an NNX module, and runs in Linen through flax's
bridge. The registry names this package by string and nothing imports it, so one commit can delete it.
"""

"""All Linen code: the decoder stack, the transformer, the bridges and the TrainState.

The mathematics of a block is not here: it is written once, as an NNX module, and runs in Linen through flax's bridge.
The registry names this package by string and nothing imports it, so one commit can delete it.
"""

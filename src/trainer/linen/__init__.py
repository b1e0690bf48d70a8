"""All Linen code: the decoder stack, the transformer, the bridges and the TrainState.

A block's math is not in this package. It is written once, as an NNX module, and runs in Linen through flax's bridge.
The registry refers to this package by string and nothing imports it, so one commit can delete it.
"""

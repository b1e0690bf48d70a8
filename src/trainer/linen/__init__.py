"""All Linen code: the decoder stack, the transformer, the bridges and the TrainState.

A block's math is not in this package. It is written once, as an NNX module, and runs in Linen through flax's bridge.
No other module of `trainer` imports this package, and only strings in `backends.registry` refer to it, so one commit
can delete it.
"""

"""The interface between the trainer and the module systems.

A model implements one combination of the flags: it draws initial parameters and runs. A `StateCodec`, made from a model
and an optimizer, makes native train states and converts them to a `TrainTree`; all other code is written once, over
`TrainTree`s.
"""

"""The seam between the trainer and the module systems.

A model serves one row of the flags' table: it draws initial parameters and runs. A `StateCodec`, made from a model and
an optimizer, makes native train states and translates them to a `TrainTree`; all else is written once, over that.
"""

from trainer.backends.base import Model, StateCodec, TrainTree
from trainer.backends.registry import make_model
from trainer.backends.train_state import TrainStateNNX

__all__ = ["Model", "StateCodec", "TrainStateNNX", "TrainTree", "make_model"]

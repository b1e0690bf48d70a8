"""The seam between the trainer and the module systems.

A backend serves one row of the flags' table. It makes a native train state, runs the model, and translates between the
native state and a `TrainTree`, over which everything else is written once.
"""

from trainer.backends.base import Backend, TrainTree
from trainer.backends.codec import Codec
from trainer.backends.registry import make_backend
from trainer.backends.train_state import TrainStateNNX

__all__ = ["Backend", "Codec", "TrainStateNNX", "TrainTree", "make_backend"]

"""Turns sources of text into batches of tokens."""

from trainer.data.batches import FIELDS, Batch, RowSource, eval_batches, local_rows, train_batch
from trainer.data.dataset import Dataset, open_dataset
from trainer.data.loader import Loader
from trainer.data.streams import Position, Stream

__all__ = [
    "FIELDS",
    "Batch",
    "Dataset",
    "Loader",
    "Position",
    "RowSource",
    "Stream",
    "eval_batches",
    "local_rows",
    "open_dataset",
    "train_batch",
]

"""Rows of tokens from a source, as batches of a step."""

from trainer.data.batches import FIELDS, Batch, RowSource, eval_batches, local_rows, train_batch
from trainer.data.dataset import Dataset, open_dataset
from trainer.data.loader import Loader

__all__ = [
    "FIELDS",
    "Batch",
    "Dataset",
    "Loader",
    "RowSource",
    "eval_batches",
    "local_rows",
    "open_dataset",
    "train_batch",
]

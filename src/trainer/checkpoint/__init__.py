"""Parameters on disk: what others wrote, and what `trainer.export` writes."""

from trainer.checkpoint.description import model_config
from trainer.checkpoint.huggingface_out import write_huggingface
from trainer.checkpoint.load import load_parameters, open_source
from trainer.checkpoint.params_out import write_params
from trainer.checkpoint.source import Leaf, Shapes, Source, names_of, nested
from trainer.checkpoint.tokenizer import copy_tokenizer

__all__ = [
    "Leaf",
    "Shapes",
    "Source",
    "copy_tokenizer",
    "load_parameters",
    "model_config",
    "names_of",
    "nested",
    "open_source",
    "write_huggingface",
    "write_params",
]

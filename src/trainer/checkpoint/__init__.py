"""Train states and parameters on disk: checkpoints of runs, of other software, and of `trainer.export`."""

from trainer.checkpoint.about import About, about_in, about_tokenizer, copy_beside
from trainer.checkpoint.adapters import Adapters
from trainer.checkpoint.base import base_of, check_base, place_of, with_base, without_base
from trainer.checkpoint.compare import check_dtypes
from trainer.checkpoint.contents import Contents, Tensor, contents_of
from trainer.checkpoint.described import own_run, with_model
from trainer.checkpoint.description import load_model_keys, model_config
from trainer.checkpoint.huggingface_out import write_huggingface
from trainer.checkpoint.load import initial_parameters, load_parameters, of_checkpoint
from trainer.checkpoint.manager import CheckpointManager, SavedCheckpoints, inspect, newest, restore
from trainer.checkpoint.masks import check_masks, with_zeros
from trainer.checkpoint.maxtext_out import write_maxtext
from trainer.checkpoint.open import open_adapters, open_source, weight_shapes, weights_of
from trainer.checkpoint.params_out import write_params
from trainer.checkpoint.peft_out import write_peft
from trainer.checkpoint.save import is_due, maybe_save_checkpoint
from trainer.checkpoint.sidecar import Base, Sidecar, saved_config
from trainer.checkpoint.source import Leaf, Shapes, Source, filled, joined, names_of, nested, parted

__all__ = [
    "About",
    "Adapters",
    "Base",
    "CheckpointManager",
    "Contents",
    "Leaf",
    "SavedCheckpoints",
    "Shapes",
    "Sidecar",
    "Source",
    "Tensor",
    "about_in",
    "about_tokenizer",
    "base_of",
    "check_base",
    "check_dtypes",
    "check_masks",
    "contents_of",
    "copy_beside",
    "filled",
    "initial_parameters",
    "inspect",
    "is_due",
    "joined",
    "load_model_keys",
    "load_parameters",
    "maybe_save_checkpoint",
    "model_config",
    "names_of",
    "nested",
    "newest",
    "of_checkpoint",
    "open_adapters",
    "open_source",
    "own_run",
    "parted",
    "place_of",
    "restore",
    "saved_config",
    "weight_shapes",
    "weights_of",
    "with_base",
    "with_model",
    "with_zeros",
    "without_base",
    "write_huggingface",
    "write_maxtext",
    "write_params",
    "write_peft",
]

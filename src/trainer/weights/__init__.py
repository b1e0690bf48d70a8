"""Models in and out: in the formats of Hugging Face, PEFT, MaxText and this trainer."""

from trainer.weights.about_files import about_in, about_tokenizer, copy_beside
from trainer.weights.adapters import Adapters
from trainer.weights.contents import Contents, Tensor, contents_of
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import initial_parameters, load_parameters, of_checkpoint
from trainer.weights.masks import check_masks, with_zeros
from trainer.weights.maxtext.write import write_maxtext
from trainer.weights.model_keys import load_model_keys, model_config
from trainer.weights.model_of_command import own_run, with_model
from trainer.weights.open import open_adapters, open_source, weight_shapes, weights_of
from trainer.weights.params.write import write_params
from trainer.weights.peft.write import write_peft

__all__ = [
    "Adapters",
    "Contents",
    "Tensor",
    "about_in",
    "about_tokenizer",
    "check_masks",
    "contents_of",
    "copy_beside",
    "initial_parameters",
    "load_model_keys",
    "load_parameters",
    "model_config",
    "of_checkpoint",
    "open_adapters",
    "open_source",
    "own_run",
    "weight_shapes",
    "weights_of",
    "with_model",
    "with_zeros",
    "write_huggingface",
    "write_maxtext",
    "write_params",
    "write_peft",
]

"""The tokens that end a sequence."""

from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.data.tokenizer import Tokenizer
from trainer.weights.open import open_source


def stop_tokens(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a sequence, from the tokenizer and, if it exists, the model's folder.

    Raises:
      UserError: the folder is damaged.
    """
    tokens = [] if tokenizer.eos is None else [tokenizer.eos]
    path = config.load_parameters_path
    if path and ("://" in path or local_path(path).exists()):
        tokens += open_source(path, config.decoder_block, verify=False).about.ends
    return list(dict.fromkeys(tokens))

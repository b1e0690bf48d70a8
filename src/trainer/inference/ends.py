"""The tokens before a prompt, and those that end a sequence."""

from trainer.checkpoint import open_source
from trainer.checkpoint.huggingface import HuggingFaceSource
from trainer.checkpoint.tokenizer import GENERATION
from trainer.config import Config, UserError
from trainer.config.json_files import read_object
from trainer.config.paths import local_path
from trainer.data.tokenizer import JsonTokenizer, Tokenizer
from trainer.runtime.folders import check_folder


def begin_tokens(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens before a prompt for the model of load_parameters_path: those that the tokenizer.json of a
    Hugging Face directory adds, otherwise, or if the directory is gone, the token before each document."""
    if tokenizer.bos is None:
        return []
    path = config.load_parameters_path
    there = path and ("://" in path or local_path(path).exists())
    published = there and isinstance(open_source(path, config.decoder_block), HuggingFaceSource)
    return tokenizer.template if published and isinstance(tokenizer, JsonTokenizer) else [tokenizer.bos]


def stop_tokens(config: Config, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a sequence: from the tokenizer, and from generation_config.json next to the
    checkpoint.

    Raises:
      UserError: that file is not valid.
    """
    tokens = [] if tokenizer.eos is None else [tokenizer.eos]
    path = config.load_parameters_path
    if path and "://" not in path and (file := local_path(path) / GENERATION).is_file():
        check_folder(file.parent, [GENERATION])
        named = read_object(file).get("eos_token_id")
        tokens += named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(token, int) for token in tokens):
            raise UserError(f"{file}: eos_token_id={named}, not a token id, nor a list of them")
    return list(dict.fromkeys(tokens))

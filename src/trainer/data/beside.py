"""Reads the files next to a tokenizer file. They name the special tokens, and exports copy their contents."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.errors import UserError
from trainer.config.json_files import read_object, shown
from trainer.config.tokenizer_files import SPECIAL_TOKENS, TOKENIZER_CONFIG, VOCABULARIES, tokenizer_parts
from trainer.runtime.folders import read_bounded

EOT_TEXT = "<|endoftext|>"  # the special token of tokenizers that this trainer trains
# The tokenizer_config.json that earlier versions wrote for the tokenizers they trained.
_OF_TRAINED = {"bos_token": EOT_TEXT, "eos_token": EOT_TEXT}


class Beside(NamedTuple):
    """The content of the files next to a tokenizer file.

    Attributes:
      names: maps the roles of special tokens (bos_token, eos_token, ...) to the tokens.
      begins: whether texts begin with bos_token; None if no file specifies it. Only used if the tokenizer file itself
        does not specify it.
      files: maps the path of each of the tokenizer's files within its folder to the file's content; {} for a tokenizer
        that was not read from files.
    """

    names: Mapping[str, str] = {}
    begins: bool | None = None
    files: Mapping[str, bytes] = {}


def read_beside(file: Path) -> Beside:
    """Reads the files next to the tokenizer `file`. The special tokens in special_tokens_map.json override those in
    tokenizer_config.json, unless the latter has added_tokens_decoder, as in transformers.

    Raises:
      UserError: a file is damaged or too large, or its entry for a special token is invalid.
    """
    folder = file.parent
    parts = tokenizer_parts(folder)
    if file.name not in VOCABULARIES:  # then the vocabularies may be another tokenizer's
        parts = [name for name in parts if name not in VOCABULARIES]
    files = {name: read_bounded(folder / name) for name in parts}
    config = read_object(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
    names = _names(config, folder / TOKENIZER_CONFIG)
    if SPECIAL_TOKENS in files and "added_tokens_decoder" not in config:
        names |= _names(read_object(folder / SPECIAL_TOKENS), folder / SPECIAL_TOKENS)
    begins = config.get("add_bos_token", True if config == _OF_TRAINED else None)
    return Beside(names, begins if isinstance(begins, bool) else None, files)


def _names(given: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns the special tokens that a file names. In the file, each token is a string or a dict with `content`."""
    names = {}
    for name in (key for key in given if key.endswith("_token")):
        value = given[name]
        value = value.get("content") if isinstance(value, dict) else value
        if not isinstance(value, str | None) and name in ("bos_token", "eos_token"):
            raise UserError(
                f"tokenizer_path: {path}: {name}={shown(given[name])}, neither text nor an object with content"
            )
        if isinstance(value, str):
            names[name] = value
    return names

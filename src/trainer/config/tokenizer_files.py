"""The files of tokenizers, by tokenizer_type."""

from pathlib import Path

from trainer.config.json_files import read_object

TOKENIZER_FILES = {
    "huggingface": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tokenizer.tiktoken",
}
TOKENIZER_CONFIG = "tokenizer_config.json"


def says_bytes(config: Path) -> bool:
    """Returns whether a tokenizer_config.json is that of the bytes tokenizer.

    Raises:
      UserError: it is not a JSON object.
    """
    return read_object(config).get("tokenizer_type") == "bytes"


def has_tokenizer(folder: Path, kind: str) -> bool:
    """Returns whether tokenizer_path may name `folder`. `kind` is tokenizer_type."""
    names = [TOKENIZER_FILES[kind]] if kind in TOKENIZER_FILES else [*TOKENIZER_FILES.values()]
    if any((folder / name).is_file() for name in names):
        return True
    config = folder / TOKENIZER_CONFIG
    return kind == "auto" and config.is_file() and says_bytes(config)

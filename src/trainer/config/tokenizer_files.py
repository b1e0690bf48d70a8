"""The files of tokenizers, by tokenizer_type, and the files that accompany them."""

from pathlib import Path
from typing import Any

from trainer.config.json_files import read_object

TOKENIZER_FILES = {
    "huggingface": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tokenizer.tiktoken",
}
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE_FILE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # a file; a folder of files NAME.jinja
WITH_TOOLS = "tool_use"  # the name of the template for conversations with tools
GGUF = ".gguf"  # a file that contains a tokenizer in addition to weights
# File names of transformers and sentencepiece: vocabularies, and files that may accompany any vocabulary.
VOCABULARIES = (*TOKENIZER_FILES.values(), "vocab.json", "merges.txt", "added_tokens.json")
SETTINGS = (TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE_FILE, "chat_template.json", TEMPLATES)


def tokenizer_parts(folder: Any) -> list[str]:
    """Returns the paths of the tokenizer's files relative to `folder`, which may be local or in a bucket."""
    names = [name for name in (*VOCABULARIES, *SETTINGS) if (folder / name).is_file()]
    templates = folder / TEMPLATES
    named = sorted(path.name for path in templates.glob("*.jinja")) if templates.is_dir() else []
    return names + [f"{TEMPLATES}/{name}" for name in named]


def says_bytes(config: Path) -> bool:
    """Returns whether a tokenizer_config.json belongs to the byte tokenizer. Raises UserError if it is not a JSON
    object."""
    return read_object(config).get("tokenizer_type") == "bytes"


def is_gguf(path: Any) -> bool:
    """Returns whether `path` is a GGUF file on this machine."""
    return isinstance(path, Path) and path.suffix == GGUF and path.is_file()


def has_tokenizer(folder: Path, kind: str) -> bool:
    """Returns whether `folder`, which may also be a GGUF file, is a valid tokenizer_path for the tokenizer_type
    `kind`."""
    if is_gguf(folder):
        return kind in ("auto", "huggingface")  # its tokenizer is converted to a tokenizer.json
    names = [TOKENIZER_FILES[kind]] if kind in TOKENIZER_FILES else [*TOKENIZER_FILES.values()]
    if any((folder / name).is_file() for name in names):
        return True
    config = folder / TOKENIZER_CONFIG
    return kind == "auto" and config.is_file() and says_bytes(config)

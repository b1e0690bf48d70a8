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
TEMPLATE_FILE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # a file, and a folder of NAME.jinja
WITH_TOOLS = "tool_use"  # the name of the template for conversations with tools
GGUF = ".gguf"  # a file that contains a tokenizer in addition to weights
# Names in transformers and sentencepiece: of vocabularies, and of files that may accompany any of them.
VOCABULARIES = (*TOKENIZER_FILES.values(), "vocab.json", "merges.txt", "added_tokens.json")
SETTINGS = (TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE_FILE, "chat_template.json", TEMPLATES)


def tokenizer_parts(folder: Any) -> list[str]:
    """Returns the paths in `folder`, which is on this machine or in a bucket, of the files of its tokenizer."""
    names = [name for name in (*VOCABULARIES, *SETTINGS) if (folder / name).is_file()]
    templates = folder / TEMPLATES
    named = sorted(path.name for path in templates.glob("*.jinja")) if templates.is_dir() else []
    return names + [f"{TEMPLATES}/{name}" for name in named]


def says_bytes(config: Path) -> bool:
    """Returns whether a tokenizer_config.json is the bytes tokenizer's. Raises UserError if it is not a JSON object."""
    return read_object(config).get("tokenizer_type") == "bytes"


def is_gguf(path: Any) -> bool:
    """Returns whether `path` is a GGUF file on this machine."""
    return isinstance(path, Path) and path.suffix == GGUF and path.is_file()


def has_tokenizer(folder: Path, kind: str) -> bool:
    """Returns whether tokenizer_path may name `folder`, or a GGUF file. `kind` is tokenizer_type."""
    if is_gguf(folder):
        return kind in ("auto", "huggingface")  # its tokenizer is read as a tokenizer.json
    names = [TOKENIZER_FILES[kind]] if kind in TOKENIZER_FILES else [*TOKENIZER_FILES.values()]
    if any((folder / name).is_file() for name in names):
        return True
    config = folder / TOKENIZER_CONFIG
    return kind == "auto" and config.is_file() and says_bytes(config)

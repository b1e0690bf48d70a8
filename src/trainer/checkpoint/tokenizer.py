"""The tokenizer files of a checkpoint."""

from pathlib import Path

from trainer.runtime.folders import read_bounded

GENERATION = "generation_config.json"
# Names in transformers and sentencepiece, and generation_config.json, which names the tokens that end a text.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", GENERATION),
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies each of `FILES` that exists in `source`."""
    for name in FILES:
        if (source / name).is_file():
            (target / name).write_bytes(read_bounded(source / name))

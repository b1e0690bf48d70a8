"""Reads and writes the files in a model's folder that contain its metadata (`leaves.about.About`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.config.json_files import Field, field_problems, read_object, shown
from trainer.data.tokenizer_files import tokenizer_parts_of
from trainer.leaves.about import CHANGED, FIELDS, GENERATION, TOKENS, About
from trainer.weights.huggingface.config_fields import neutral_keys

_IDS = Field(int, null=True, many=True)
_BOS, _END, _PAD = TOKENS


def about_in(folder: Any, fields: Mapping[str, Any] | None = None) -> About:
    """Returns the metadata in the files of `folder`, a path on this machine or in a bucket.

    Args:
      fields: the fields of the folder's config.json; by default, the content of its huggingface.json.

    Raises:
      UserError: a file is damaged, or a value has the wrong type.
    """
    changed = dict[str, Any]()
    if fields is None and (folder / FIELDS).is_file():
        said = read_object(folder / FIELDS)
        changed = said.get(CHANGED, {})
        if not isinstance(changed, dict):
            raise UserError(f"{folder / FIELDS}: {CHANGED}={shown(changed)}, not an object")
        fields = neutral_keys(said, str(folder / FIELDS))
    generation = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else None
    if wrong := field_problems(generation or {}, dict.fromkeys(TOKENS, _IDS)):
        raise UserError("\n  ".join([f"{folder / GENERATION}:", *wrong]))
    return About(fields or {}, generation, changed)


def about_tokenizer(bos: int | None, eos: int | None) -> About:
    """Returns the metadata of a model of which only the tokenizer's tokens `bos` and `eos` are known."""
    said = {_BOS: bos, _END: eos}
    return About({**said, _PAD: None}, {name: token for name, token in said.items() if token is not None})


def copy_beside(folder: Any, about: About, target: Path, *, fields: bool) -> None:
    """Writes the tokenizer's files of `folder`, and `about`, into `target`.

    Args:
      folder: a path on this machine or in a bucket, or a GGUF file.
      fields: whether to also write huggingface.json, because `target` has no config.json.
    """
    files = tokenizer_parts_of(folder)
    files |= {name: data for name, data in about.files().items() if fields or name != FIELDS}
    for name, data in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)

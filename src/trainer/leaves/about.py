"""A model's metadata: end-of-text tokens, maximum text length, and sampling settings.

The metadata is read once, copied into a run's checkpoints, and written by every export.

A Hugging Face folder stores the metadata in config.json and generation_config.json. A run's checkpoint, and a folder
from trainer.export or trainer.quantize, store two files next to the tokenizer: generation_config.json, and
huggingface.json with the fields of config.json.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainer.config.json_files import shown
from trainer.config.words import visible

GENERATION, FIELDS = "generation_config.json", "huggingface.json"
CHANGED = "changed_by_training"
# Fields of config.json.
TOKENS, LONGEST = ("bos_token_id", "eos_token_id", "pad_token_id"), "max_position_embeddings"
# Fields for the placeholder tokens of images and videos, and for the tokens that mark their beginning and end.
IMAGES = (
    *("image_token_index", "boi_token_index", "eoi_token_index"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
_, _END, _ = TOKENS
# Suffixes of the names of fields that depend on the tokenizer.
_OF_TOKENIZER = ("_id", "_ids", "_token_index", "suppress_tokens", "tokenizer_class")


class About(NamedTuple):
    """A model's metadata.

    Attributes:
      fields: the fields of config.json that do not affect the model's results (`config_fields.NEUTRAL`).
      generation: the contents of generation_config.json; None if the model has no such file.
      changed: a dict from the name of each item that training changed to the item's former value. For a changed chat
        template, the former value is None.
    """

    fields: Mapping[str, Any] = {}
    generation: Mapping[str, Any] | None = None
    changed: Mapping[str, Any] = {}

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text, from generation_config.json or, if that file has none, from config.json."""
        said = (self.generation or {}).get(_END)
        return _listed(self.fields.get(_END) if said is None else said)

    @property
    def images(self) -> dict[int, str]:
        """A dict from each image token of a multimodal model to the name of the token's field in config.json."""
        return {self.fields[name]: name for name in IMAGES if self.fields.get(name) is not None}

    @property
    def tokens(self) -> set[int]:
        """The bos, eos and pad tokens in `fields` and `generation`."""
        said = [{**holder}.get(name) for holder in (self.fields, self.generation or {}) for name in TOKENS]
        return {token for value in said for token in _listed(value)}

    def trained(self, ends: Iterable[int], length: int | None, other_template: bool) -> "About":
        """Returns the metadata after training.

        Args:
          ends: the tokens that end the training texts.
          length: the row length in training, in tokens; None if the model's RoPE scaling sets the maximum text length.
          other_template: whether training used a different chat template.
        """
        fields, changed = dict(self.fields), dict(self.changed)
        generation = None if self.generation is None else dict(self.generation)
        if new := [token for token in dict.fromkeys(ends) if token not in self.ends]:
            changed.setdefault(_END, _one(self.ends))
            if generation is not None:
                generation[_END] = _one([*self.ends, *new])
            if generation is None or fields.get(_END) is not None:
                fields[_END] = _one([*_listed(fields.get(_END)), *new])
        if length is not None and length > (longest := fields.get(LONGEST) or length):
            changed.setdefault(LONGEST, longest)
            fields[LONGEST] = length
        if other_template:
            changed.setdefault("chat_template", None)
        return About(fields, generation, changed)

    def under(self, other: "About") -> "About":
        """Returns this metadata, overridden by `other`, the metadata of adapters of the model."""
        generation = self.generation if other.generation is None else other.generation
        return About({**self.fields, **other.fields}, generation, {**self.changed, **other.changed})

    def without_tokens(self) -> "About":
        """Returns the metadata that remains valid with a different tokenizer."""

        def rest(given: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in given.items() if not name.endswith(_OF_TOKENIZER)}

        changed = {_END: _one(self.ends)} if self.ends else {}
        # In the metadata of adapters, a field that is None overrides the base model's; a missing field does not.
        return About(
            rest(self.fields) | dict.fromkeys(TOKENS),
            None if self.generation is None else rest(self.generation),
            rest(self.changed) | changed,
        )

    def note(self) -> str:
        """Returns a line that lists the items that training changed; "" if none changed."""
        now = {**self.fields, **(self.generation or {})}
        values = {name: f"={shown(now[name])} (was {shown(was)})" for name, was in self.changed.items() if name in now}
        listed = [f"{name}{values.get(name, '')}" for name in self.changed]
        return visible(f"changed by training: {', '.join(listed)}") if listed else ""

    def files(self) -> dict[str, bytes]:
        """Returns a dict from the name of each file to store next to a tokenizer to the file's contents."""
        fields = {**self.fields, **({CHANGED: dict(self.changed)} if self.changed else {})}
        found = {FIELDS: fields or None, GENERATION: self.generation}
        return {name: (json.dumps(data, indent=2) + "\n").encode() for name, data in found.items() if data is not None}


def _listed(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _one(tokens: list[int]) -> Any:
    """Returns the list `tokens`; for a list of one token, the token itself; for an empty list, None."""
    return tokens if len(tokens) > 1 else tokens[0] if tokens else None

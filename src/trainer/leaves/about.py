"""What a model's folder says about the model beside its weights: which tokens end a text, how long one may be, how to
sample. It is read once, travels with a run and its checkpoints, and is written by every export.

In a folder of Hugging Face it is in config.json and generation_config.json. In a run's checkpoint and in a folder that
trainer.export or trainer.quantize wrote, it lies beside the tokenizer, with the fields of config.json in
huggingface.json.
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
IMAGES = ("image_token_index", "boi_token_index", "eoi_token_index")  # tokens that stand for images, and around them
_, _END, _ = TOKENS
_OF_TOKENIZER = ("_id", "_ids", "_token_index", "suppress_tokens", "tokenizer_class")  # ends of names


class About(NamedTuple):
    """
    Attributes:
      fields: the fields of config.json that do not affect what the model computes (`config_fields.NEUTRAL`).
      generation: generation_config.json; None without one.
      changed: what training changed, by name, with the value before; None for a text.
    """

    fields: Mapping[str, Any] = {}
    generation: Mapping[str, Any] | None = None
    changed: Mapping[str, Any] = {}

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text: of generation_config.json, or of config.json if that says nothing."""
        said = (self.generation or {}).get(_END)
        return _listed(self.fields.get(_END) if said is None else said)

    @property
    def images(self) -> dict[int, str]:
        """The tokens of images, of a model that has a tower for them, with the fields that name them."""
        return {self.fields[name]: name for name in IMAGES if self.fields.get(name) is not None}

    @property
    def tokens(self) -> set[int]:
        """All tokens that it names but those of images."""
        said = [{**holder}.get(name) for holder in (self.fields, self.generation or {}) for name in TOKENS]
        return {token for value in said for token in _listed(value)}

    def trained(self, ends: Iterable[int], length: int | None, other_template: bool) -> "About":
        """Returns this after a training.

        Args:
          ends: the tokens with which the texts of the training end.
          length: of its rows in tokens; None if the model's keys say how long a text may be.
          other_template: whether its chat template was another one.
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
        """Returns this, except for what `other` says, which belongs to adapters of the model."""
        generation = self.generation if other.generation is None else other.generation
        return About({**self.fields, **other.fields}, generation, {**self.changed, **other.changed})

    def without_tokens(self) -> "About":
        """Returns what holds for another tokenizer."""

        def rest(given: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in given.items() if not name.endswith(_OF_TOKENIZER)}

        changed = {_END: _one(self.ends)} if self.ends else {}
        # null, not absent: so it counts against what the base of adapters says.
        return About(
            rest(self.fields) | dict.fromkeys(TOKENS),
            None if self.generation is None else rest(self.generation),
            rest(self.changed) | changed,
        )

    def note(self) -> str:
        """Returns a line that lists what training changed; "" if nothing."""
        now = {**self.fields, **(self.generation or {})}
        values = {name: f"={shown(now[name])} (was {shown(was)})" for name, was in self.changed.items() if name in now}
        listed = [f"{name}{values.get(name, '')}" for name in self.changed]
        return visible(f"changed by training: {', '.join(listed)}") if listed else ""

    def files(self) -> dict[str, bytes]:
        """Returns the files that lie beside a tokenizer, by name."""
        fields = {**self.fields, **({CHANGED: dict(self.changed)} if self.changed else {})}
        found = {FIELDS: fields or None, GENERATION: self.generation}
        return {name: (json.dumps(data, indent=2) + "\n").encode() for name, data in found.items() if data is not None}


def _listed(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _one(tokens: list[int]) -> Any:
    """Returns a list, or its only token; None for an empty one."""
    return tokens if len(tokens) > 1 else tokens[0] if tokens else None

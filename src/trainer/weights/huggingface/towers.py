"""Hugging Face directories of multimodal models, which have towers for other data, such as images.

Only the text model is read, as if it had been saved alone, with its own config.json and tensors.
`trainer.models.huggingface.Outer` declares a multimodal model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.errors import UserError, shortened
from trainer.config.json_files import shown
from trainer.config.words import counted
from trainer.leaves.about import LONGEST
from trainer.models.huggingface import HuggingFace, Outer
from trainer.observe.text import si
from trainer.weights.huggingface.config_fields import NEUTRAL, mistyped, unknown_outer_fields
from trainer.weights.huggingface.config_json import declarations
from trainer.weights.huggingface.quantization_config import FIELDS as QUANTIZED
from trainer.weights.huggingface.safetensors_file import StoredTensor

_TEXT, _TIED = "text_config", "tie_word_embeddings"
# Maps each prefix of tensor names in a text model that is saved alone to two possible prefixes in a multimodal
# directory. Published models have the first prefix, and transformers 4 and 5 save it. The second prefix is the module's
# name in transformers 5, which reads both prefixes.
_BODY, _HEAD = "model.", "lm_head."
_PREFIXES = {
    _BODY: ("language_model.model.", "model.language_model."),
    _HEAD: ("language_model.lm_head.", "lm_head."),
}
_MOST = 20  # the maximum number of lines in a message


class TextModel(NamedTuple):
    """The text model in the directory of a multimodal model.

    Attributes:
      outer: the declaration of the multimodal model.
      config: the config.json that the text model would have if it were saved alone.
      tensors: the text model's tensors, by their names in the directory.
      others: all other tensors, by name.
      prefixes: a dict from each prefix of tensor names in a text model that is saved alone to the prefix that replaces
        it in this directory.
    """

    outer: Outer
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    others: Mapping[str, StoredTensor]
    prefixes: Mapping[str, str]

    def alone(self, name: str) -> str:
        """Returns the name that the tensor `name`, one of `tensors`, has if the text model is saved alone."""
        own, here = next(pair for pair in self.prefixes.items() if name.startswith(pair[1]))
        return own + name.removeprefix(here)

    def here(self, name: str) -> str:
        """Inverts `alone`. If the directory has no head tensor, the head gets the name that transformers uses."""
        own = next((own for own in {**_PREFIXES, **self.prefixes} if name.startswith(own)), "")
        return self.prefixes.get(own, own) + name.removeprefix(own)

    def note(self) -> str:
        """Returns a line about the tensors that are not read."""
        towers = dict[str, list[StoredTensor]]()
        for name, tensor in self.others.items():
            towers.setdefault(name.removeprefix("model.").partition(".")[0], []).append(tensor)
        sizes = [f"{name} ({counted(len(them), 'tensor')}, {_bytes(them)})" for name, them in towers.items()]
        return f"only the text model of {self.outer.model_type} is read; left out: {', '.join(sizes) or 'no tensors'}"


def _bytes(tensors: list[StoredTensor]) -> str:
    return si(sum(tensor.nbytes for tensor in tensors), "B").strip()


def text_model(
    data: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: Path, decoder_block: str = ""
) -> TextModel | None:
    """Returns the text model of a directory; None if no family declares the directory's model as an `Outer`.

    Args:
      data: config.json, parsed.
      tensors: all tensors, by name.
      where: the path of config.json.
      decoder_block: see `huggingface.config_json.model_keys`.

    Raises:
      UserError: there is no text model, the declaration does not list the text model's type, or a field or tensor is
        unknown.
    """
    known = [hf for _, hf in declarations(decoder_block)]
    outer = next((it for hf in known for it in hf.outers if it.model_type == data.get("model_type")), None)
    if outer is None:
        return None
    text = data.get(_TEXT)
    if not isinstance(text, Mapping):
        raise UserError(f"{where}: {_TEXT}={shown(text)}, not an object that describes the text model")
    kind = text.get("model_type") or outer.texts[0]
    if kind not in outer.texts:
        allowed = ", ".join(outer.texts)
        raise UserError(f"{where}: {_TEXT} has model_type={shown(kind)}; known in {outer.model_type}: {allowed}")
    if wrong := [*mistyped(data), *(f"{_TEXT}: {line}" for line in mistyped(text))]:
        raise UserError("\n  ".join([f"{where}: values that are not allowed in config.json:", *wrong]))
    if refused := unknown_outer_fields(outer, data):
        raise UserError("\n  ".join([f"{where}: has fields that cannot be represented here:", *refused]))
    hf = next(hf for hf in known if kind in (hf.model_type, *hf.aliases))
    prefixes = _prefixes(tensors, where.parent, hf.mtp.above)
    own = {name: it for name, it in tensors.items() if name.startswith(tuple(prefixes.values()))}
    others = {name: it for name, it in tensors.items() if name not in own}
    towers = tuple(f"{above}{tower}." for tower in outer.towers for above in ("", "model."))
    if unknown := [shortened(name) for name in others if not name.startswith(towers)]:
        head = f"{where.parent}: tensors that belong neither to the text model nor to {' and '.join(outer.towers)}:"
        more = [f"and {len(unknown) - _MOST} more"] if len(unknown) > _MOST else []
        raise UserError("\n  ".join([head, *unknown[:_MOST], *more]))
    config = {**_fields(outer, hf, data), "model_type": kind, _TIED: _is_tied(outer, hf, data, _HEAD in prefixes)}
    return TextModel(outer, config, own, others, prefixes)


def _prefixes(tensors: Mapping[str, StoredTensor], where: Path, module: str) -> dict[str, str]:
    """Returns `TextModel.prefixes`. `module`: see `Modules.above`.

    Raises:
      UserError: there is no text model, or there are several: tensor names begin with more than one of the possible
        prefixes.
    """
    found = dict[str, str]()
    of_module = {} if module.startswith(_BODY) else {module: (module, f"{_BODY}{module}")}
    for own, forms in (_PREFIXES | of_module).items():
        used = [form for form in forms if any(name.startswith(form) for name in tensors)]
        if len(used) > 1:
            raise UserError(f"{where}: two text models: names of tensors begin with {' and with '.join(used)}")
        found |= dict.fromkeys((own,), used[0]) if used else {}
    if _BODY not in found:
        raise UserError(f"{where}: no text model: no tensor name begins with {' or '.join(_PREFIXES[_BODY])}")
    return found


def _fields(outer: Outer, hf: HuggingFace, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json that the text model would have if it were saved alone: `text_config` with defaults.

    The fields in `NEUTRAL` (except the maximum text length) and, as in transformers, the quantization fields are taken
    from the top level of config.json if they are present there."""
    whole = {name: data[name] for name in NEUTRAL if data.get(name) is not None and name != LONGEST}
    quantized = {name: data[name] for name in QUANTIZED if data.get(name)}
    return {**hf.nested, **data[_TEXT], **outer.tokens, **whole, **quantized}


def _is_tied(outer: Outer, hf: HuggingFace, data: Mapping[str, Any], has_head: bool) -> bool:
    """Returns whether the head is tied to the embedding table. transformers 4 reads this from `text_config`,
    transformers 5 from the top level of config.json. If the two values differ, transformers 5 ties the head, unless the
    head has a separate tensor."""
    above, below = bool(data.get(_TIED, outer.tied)), bool(data[_TEXT].get(_TIED, hf.nested.get(_TIED, False)))
    return above if above == below else not has_head

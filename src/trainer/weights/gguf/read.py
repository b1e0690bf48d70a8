"""Reads GGUF files as checkpoints, in the same way as Hugging Face folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, shortened
from trainer.config.keys import Config
from trainer.config.limits import EXPERTS
from trainer.config.words import visible
from trainer.data.gguf_tokenizer import MORE_ENDS
from trainer.leaves.about import TOKENS, About
from trainer.leaves.gguf_file import GgufHeader, read_gguf
from trainer.models import FAMILIES
from trainer.models.families import family
from trainer.models.gguf import COUNT, EPSILON
from trainer.models.huggingface import EXPERT, HuggingFace, Modules
from trainer.models.mtp_names import MODULE_TENSORS, MODULES
from trainer.weights.gguf.fields import FACTORS, read_fields
from trainer.weights.gguf.tensors import (
    MERGED,
    OF_LATENTS,
    GgufTensor,
    KeysAndValues,
    as_hugging_face,
    divided,
    joined_latents,
    name_there,
    stored_tensors,
)
from trainer.weights.huggingface.config_fields import neutral_keys
from trainer.weights.huggingface.config_json import model_keys
from trainer.weights.huggingface.merged import stored_name
from trainer.weights.huggingface.read import HuggingFaceSource

_BOS, _END, _ = TOKENS
_MOST_EXPERTS = 1 << 17  # the maximum number of experts in all layers together; DeepSeek-V3 has 15 thousand


class GgufSource(HuggingFaceSource):
    """A `Source` that reads a GGUF file. Converts its tensors to Hugging Face's names, shapes and order of entries."""

    kind = "GGUF"

    def __init__(self, path: Path, decoder_block: str = ""):
        """`decoder_block`: see `model_keys`.

        Raises:
          UserError: the file is damaged, or its architecture or the type of a value is unknown.
        """
        self.path = self.tokenizer = path
        header, where = read_gguf(path), str(path)
        if (parts := header.get("split.count", int, 1)) > 1:
            raise UserError(
                f"{path} is one of {parts} parts; merge them into one file with llama.cpp's llama-gguf-split --merge"
            )
        stored = stored_tensors(header)
        hf, data = fields_of(header, stored)
        hf = hf.in_gguf()
        keys = model_keys(data, where, decoder_block)
        self.about = _about(header, neutral_keys(data, where))
        self.length = data.get("max_position_embeddings")
        self._types, self._others, self._recipe, self._layouts = _types(stored), "", None, hf.layouts
        self._tensors = _renamed(stored, hf, data)  # type: ignore[assignment]
        self.modules = Modules().number(keys["base_num_decoder_layers"], self._tensors)
        self._float_keys = {**keys, MODULES: self.modules}

    def _declared(self, config: Config) -> HuggingFace:
        return super()._declared(config)._replace(layouts=self._layouts)

    def _check_copy(self, name: str, of: str, otherwise: str) -> None:
        """Skips the comparison if the two tensors have different types, because rounding makes their values differ."""
        if len({self._tensors[it].type for it in (name, of)}) == 1:  # type: ignore[union-attr]
            super()._check_copy(name, of, otherwise)

    def notes(self, config: Config) -> Sequence[str]:
        return [f"{self.path}: {self._types}"] if self._types else []


def fields_of(header: GgufHeader, stored: Mapping[str, GgufTensor]) -> tuple[HuggingFace, dict[str, Any]]:
    """Returns the declaration of a file's family, and the file's fields as the content of a config.json.

    Raises:
      UserError: the architecture is unknown, a tensor of RoPE factors is not a list of at most 65,536 float32 values,
        or `read_fields` refuses the fields.
    """
    hf = read_as(header, header.get("general.architecture", str, "(none)"))
    factors = {name: stored[name] for name in FACTORS if name in stored}
    for name, it in factors.items():
        if len(it.shape) != 1 or it.kind != "F32" or it.shape[0] > 1 << 16:
            raise UserError(f"{header.path}: {name} is not a list of at most 65,536 float32 values")
    return hf, read_fields(header, hf, {name: it.read((slice(0, it.shape[0]),)) for name, it in factors.items()})


def read_as(header: GgufHeader, name: str) -> HuggingFace:
    """Returns the declaration with which to read a file with the architecture `name`.

    Raises:
      UserError: no declaration applies.
    """
    declared = [(hf, hf.gguf) for block in FAMILIES for hf in family(block).hugging_face if hf.gguf]
    own = [(hf, it) for hf, it in declared if it.name == name]
    found = [hf for hf, it in own if it.when(lambda end, kind=int: header.get(f"{name}.{end}", kind))]
    if not found:
        known = ", ".join(sorted({it.name for _, it in declared}))
        experts = " with experts" if header.values.get(f"{name}.{COUNT}") is not None else ""
        how = f"with these values of {COUNT}, expert_gating_func and {EPSILON}" if own else f"(known: {known})"
        raise UserError(
            f"{header.path}: general.architecture={shortened(visible(name))}{experts} is "
            f"not read {how}; try a Hugging Face folder of this model"
        )
    return found[0]


def _about(header: GgufHeader, neutral: Mapping[str, Any]) -> About:
    ends = [neutral.get(_END), *(header.get(key, int) for key in MORE_ENDS)]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    if not ends:
        return About(neutral)
    begin = {_BOS: neutral[_BOS]} if _BOS in neutral else {}
    return About(neutral, {**begin, _END: ends if len(ends) > 1 else ends[0]})


def _types(stored: Mapping[str, GgufTensor]) -> str:
    """Returns a line on quantized tensors; "" if there are none."""
    types = [tensor.type for tensor in stored.values() if tensor.block[0] > 1]
    counts = ", ".join(f"{types.count(name)} of type {name}" for name in dict.fromkeys(types))
    return f"{len(types)} of {len(stored)} tensors are quantized, {counts}; they are read as float32" if types else ""


def _renamed(
    stored: Mapping[str, GgufTensor], hf: HuggingFace, data: Mapping[str, Any]
) -> dict[str, GgufTensor | KeysAndValues]:
    """Returns the tensors by their Hugging Face names. Tensors that the family lacks keep their names."""
    rest = {name: tensor for name, tensor in stored.items() if name not in FACTORS}
    it, found = hf.gguf, dict[str, GgufTensor | KeysAndValues]()
    assert it
    names = dict.fromkeys((*(stored_name(layout.name, hf.merged) for layout in hf.layouts.values()), *MODULE_TENSORS))
    templates = {name: there for name in names if (there := name_there(it, name)) is not None}
    experts, layers = 0, data["num_hidden_layers"] + (data.get("num_nextn_predict_layers") or 0)
    if not any(name.endswith(f"{MERGED}.weight") for name in names):
        rest = divided(rest, data)
    for name, there in templates.items():
        for i in range(layers if "{}" in there else 1):
            if name.endswith(OF_LATENTS):
                found |= joined_latents(it, name, i, rest)
            if (tensor := rest.pop(there.format(i), None)) is None:
                continue
            if EXPERT not in name:
                found[name.format(i)] = as_hugging_face(tensor, it, name, data["head_dim"])
                continue
            experts += tensor.shape[0]
            if tensor.shape[0] > EXPERTS or experts > 3 * _MOST_EXPERTS:
                raise UserError(f"{tensor.path}: {there.format(i)} has {tensor.shape[0]} experts, too many")
            found |= {name.format(i).replace(EXPERT, str(e)): tensor.expert(e) for e in range(tensor.shape[0])}
    return found | rest

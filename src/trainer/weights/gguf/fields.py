"""The model's fields in a GGUF file: read as a config.json, and written from one."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.words import visible
from trainer.data.gguf_tokenizer import special_ids
from trainer.leaves.gguf_file import GgufHeader
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace

FREQUENCIES = "rope_freqs.weight"  # the factors of RoPE of type llama3, a tensor
_SCALING, _ORIGINAL = "rope.scaling.", "rope.scaling.original_context_length"
# The rest of the numbers of RoPE of type llama3, which a GGUF file does not have: those of all published models.
_LOW, _HIGH, _ORIGINAL_LLAMA3 = 1.0, 4.0, 8192
# Keys that follow from others, or that llama.cpp does not read.
_SAME = {"attention.value_length": "head_dim", "rope.dimension_count": "head_dim"}
_ROPE = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
_HARMLESS = ("vocab_size", "tensor_data_layout")


def read_fields(header: GgufHeader, hf: HuggingFace, frequencies: np.ndarray | None) -> dict[str, Any]:
    """Returns the content of a config.json.

    Args:
      hf: the family's declaration, which has one for GGUF.
      frequencies: the values of the tensor `FREQUENCIES`, if there is one.

    Raises:
      UserError: a value has the wrong type, or its meaning is not known.
    """
    it = hf.gguf
    assert it
    prefix = f"{it.name}."
    own = {key.removeprefix(prefix) for key in header.values if key.startswith(prefix)}
    known = {*it.sizes, *it.numbers, *_SAME, *_HARMLESS, *(f"{_SCALING}{name}" for name in _ROPE)}
    if unknown := sorted(own - known):
        named = ", ".join(shortened(visible(f"{name}={header.values[prefix + name]}")) for name in unknown)
        raise UserError(f"{header.path}: {named}: not known, so it may change the function")
    said = {field: header.get(prefix + name, int) for name, field in it.sizes.items()}
    said |= {field: shortest(header.get(prefix + name, float)) for name, field in it.numbers.items()}
    said = {field: value for field, value in said.items() if value is not None}
    heads, width = said.get("num_attention_heads", 0), said.get("hidden_size", 0)
    said.setdefault("head_dim", width // max(heads, 1))
    for name, field in _SAME.items():
        if header.get(prefix + name, int, said[field]) != said[field]:
            raise UserError(f"{header.path}: {prefix}{name} is not {said[field]}, the number of entries of a head")
    table, rows = header.tensors.get("token_embd.weight"), 0
    if table is not None and len(table.shape) == 2:
        rows = table.shape[0]
    scaling = _scaling(header, prefix, said, frequencies)
    tokens = {f"{role}_id": i for role, i in special_ids(header).items() if role != "unk_token"}
    return {
        "model_type": hf.model_type,
        "rope_theta": 10000.0,
        **said,
        **({"rope_scaling": scaling} if scaling else {}),
        **it.fields(said),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **tokens,
    }


def _scaling(
    header: GgufHeader, prefix: str, said: Mapping[str, Any], frequencies: np.ndarray | None
) -> dict[str, Any] | None:
    """Returns rope_scaling."""
    kind = header.get(f"{prefix}{_SCALING}type", str, "none")
    original = header.get(f"{prefix}{_ORIGINAL}", int)
    if frequencies is not None:
        return _llama3(header, said, frequencies.astype(np.float64), original)
    factor = shortest(header.get(f"{prefix}{_SCALING}factor", float, 1.0))
    if kind == "none" or factor == 1:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(f"{header.path}: RoPE of type {shortened(visible(kind))} is not read (known: linear, yarn)")
    betas = {name: header.get(f"{prefix}{_SCALING}yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
    given = {name: shortest(value) for name, value in betas.items() if value is not None}
    context = said.get("max_position_embeddings", 0)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or context, **given}


def _llama3(header: GgufHeader, said: Mapping[str, Any], found: np.ndarray, original: int | None) -> dict[str, Any]:
    factor = float(found.max())
    for length in (original, _ORIGINAL_LLAMA3):
        rope = {"factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
        if length and math.isfinite(factor) and factor >= 1:
            rope["original_max_position_embeddings"] = length
            wanted = llama3_frequencies(rope, said.get("rope_theta", 10000.0), said["head_dim"])
            if wanted.shape == found.shape and np.allclose(wanted, found, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", **rope}
    raise UserError(
        f"{header.path}: {FREQUENCIES} has other factors than those of RoPE of type llama3 that are read, with "
        f"low_freq_factor={_LOW}, high_freq_factor={_HIGH} and the original length {original or _ORIGINAL_LLAMA3}"
    )


def llama3_frequencies(rope: Mapping[str, Any], theta: float, head: int) -> np.ndarray:
    """Returns by what RoPE of type llama3 divides each frequency of a head, float32 [head / 2].

    Source: transformers, `_compute_llama3_parameters`.
    """
    lengths = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)  # of the waves
    original, low, high = (rope[name] for name in (_POSITIONS, "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((original / lengths - low) / max(high - low, 1e-9), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


_POSITIONS = "original_max_position_embeddings"


def written_fields(it: Gguf, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys and values for `data`, a config.json as this trainer writes it."""
    found: dict[str, Any] = {name: data.get(field) for name, field in it.sizes.items()}
    found |= {name: None if data.get(field) is None else float(data[field]) for name, field in it.numbers.items()}
    found |= {name: data.get(field) for name, field in _SAME.items()} | {"vocab_size": data["vocab_size"]}
    rope = data.get("rope_scaling") or {}
    if kind := rope.get("rope_type"):
        found[_ORIGINAL] = rope.get(_POSITIONS)
        if kind != "llama3":
            found |= {f"{_SCALING}type": kind, f"{_SCALING}factor": float(rope["factor"])}
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                found[f"{_SCALING}yarn_{name}"] = float(rope[name])
    return {f"{it.name}.{name}": value for name, value in found.items() if value is not None}


def shortest(value: float | None) -> float | None:
    """Returns the shortest decimal number that is `value` in float32: 1e-5, not 9.999999747e-06."""
    return None if value is None else float(str(np.float32(value)))

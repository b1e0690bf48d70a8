"""Converts the model's fields in a GGUF file to the content of a config.json, and back."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.words import visible
from trainer.data.gguf_tokenizer import special_ids
from trainer.leaves.gguf_file import GgufHeader
from trainer.models.gguf import ATTENTION, EPSILON, LOG, USED
from trainer.models.huggingface import HuggingFace

# The tensors with RoPE factors: one for RoPE type llama3; two for longrope, one for long and one for short texts.
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
_SCALING, _ORIGINAL, _ROTATED = "rope.scaling.", "rope.scaling.original_context_length", "rope.dimension_count"
# Parameters of RoPE type llama3 that a GGUF file may lack, with the values in all published models: low frequency
# factor, high frequency factor (1.0 in Llama 4, 4.0 in other models), original context length.
_LOW, _HIGH, _ORIGINAL_LLAMA3 = 1.0, (4.0, 1.0), 8192
_NORM = "blk.0.attn_q_norm.weight"
_BIASES = "blk.0.attn_q.bias", "blk.0.attn_qkv.bias"
_HEAD, _VALUES = "attention.key_length", "attention.value_length"
# Further keys that a file may contain: those with the prefix `_SCALING`, and keys that do not change the model's
# output.
_ROPE = ("type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow")
_HARMLESS = ("vocab_size", "tensor_data_layout")
Factors = Mapping[str, np.ndarray]


def read_fields(header: GgufHeader, hf: HuggingFace, factors: Factors) -> dict[str, Any]:
    """Returns the fields of a GGUF file as the content of a config.json.

    Args:
      hf: the family's declaration, including `gguf`.
      factors: the values of those tensors in `FACTORS` that the file contains.

    Raises:
      UserError: a value has the wrong type or is missing, or a key is unknown.
    """
    it = hf.gguf
    assert it
    prefix = f"{it.name}."
    own = {key.removeprefix(prefix) for key in header.values if key.startswith(prefix)}
    known = {*it.sizes, *it.numbers, *it.more, *_HARMLESS, *(f"{_SCALING}{name}" for name in _ROPE)}
    if unknown := sorted(own - known - {_VALUES, _ROTATED}):
        named = ", ".join(shortened(visible(f"{name}={header.values[prefix + name]}")) for name in unknown)
        raise UserError(f"{header.path}: {named}: not known, so it may change the model's output")
    if lacking := [f"{prefix}{name}" for name in (EPSILON, USED, *it.needs) if name in known - own]:
        raise UserError(f"{header.path}: {', '.join(lacking)}: missing, and llama.cpp has no default")
    said = {field: header.get(prefix + name, int) for name, field in it.sizes.items()}
    said |= {field: shortest(header.get(prefix + name, float)) for name, field in it.numbers.items()}
    said = {field: value for field, value in said.items() if value is not None}
    if "num_attention_heads" in said and "num_key_value_heads" in it.sizes.values():
        said.setdefault("num_key_value_heads", said["num_attention_heads"])
    more = {name: value for name, kind in it.more.items() if (value := header.get(prefix + name, kind)) is not None}
    said |= {} if hf.latent else _heads(header, prefix, said, hf.partial)
    if "attention_bias" in hf.sizes.values():
        said["attention_bias"] = not header.tensors.keys().isdisjoint(_BIASES)
    if "use_qk_norm" in hf.sizes.values():
        said["use_qk_norm"] = _NORM in header.tensors
    table, rows = header.tensors.get("token_embd.weight"), 0
    if table is not None and len(table.shape) == 2:
        rows = table.shape[0]
    scaling = _scaling(header, prefix, said, more, factors)
    if hf.latent and scaling and scaling["rope_type"] == "yarn":
        scaling |= _of_latents(header, more)
    tokens = {f"{role}_id": i for role, i in special_ids(header).items() if role != "unk_token"}
    return {
        "model_type": hf.model_type,
        "rope_theta": 10000.0,
        **said,
        **({"rope_scaling": scaling, _POSITIONS: scaling.get(_POSITIONS)} if scaling else {}),
        **it.fields(said | more | {"rope_scaling": scaling}),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **tokens,
    }


def _heads(header: GgufHeader, prefix: str, said: Mapping[str, Any], partial: bool) -> dict[str, Any]:
    """Returns the fields for the head size and, if `partial`, the share of each head that RoPE rotates."""
    heads, width = said.get("num_attention_heads", 0), said.get("hidden_size", 0)
    head = said.get("head_dim", width // max(heads, 1))
    rotated = header.get(f"{prefix}{_ROTATED}", int, head)
    for name, value in {_VALUES: header.get(f"{prefix}{_VALUES}", int, head), _ROTATED: rotated}.items():
        if value != head and not (partial and name == _ROTATED):
            raise UserError(f"{header.path}: {prefix}{name} is not {head}, the number of entries of a head")
    return {"head_dim": head} | ({"partial_rotary_factor": rotated / max(head, 1)} if partial else {})


def _of_latents(header: GgufHeader, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns YaRN's fields that scale the scores of latent attention. Raises UserError if the key `LOG` is missing,
    because llama.cpp then also scales queries and keys in RoPE."""
    scale = round(10 * more.get(LOG, 0), 6)
    if scale <= 0 or more.get(ATTENTION, 1) != 1:
        raise UserError(
            f"{header.path}: YaRN with latent attention requires a positive {LOG}, and does not support {ATTENTION}"
        )
    return {"mscale": scale, "mscale_all_dim": scale}


def _scaling(
    header: GgufHeader, prefix: str, said: Mapping[str, Any], more: Mapping[str, Any], factors: Factors
) -> dict[str, Any] | None:
    """Returns the field rope_scaling; None if RoPE is not scaled."""
    kind = header.get(f"{prefix}{_SCALING}type", str, "none")
    original = header.get(f"{prefix}{_ORIGINAL}", int)
    attention = more.get(ATTENTION)
    if FREQUENCIES in factors:
        return _llama3(header, said, factors[FREQUENCIES].astype(np.float64), original)
    if LONG in factors and SHORT in factors:
        each = {"long_factor": factors[LONG], "short_factor": factors[SHORT]}
        lists = {name: [shortest(value) for value in values] for name, values in each.items()}
        own = {"original_max_position_embeddings": original, "attention_factor": attention or 1.0}
        return {"rope_type": "longrope", **lists, **own}
    factor = shortest(header.get(f"{prefix}{_SCALING}factor", float, 1.0))
    if kind == "none" or factor == 1:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(
            f"{header.path}: RoPE type {shortened(visible(kind))} is not supported (supported: linear, yarn)"
        )
    betas = {name: header.get(f"{prefix}{_SCALING}yarn_{name}", float) for name in ("beta_fast", "beta_slow")}
    given = {name: shortest(value) for name, value in betas.items() if value is not None}
    context = said.get("max_position_embeddings", 0)
    return {
        **{"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or context},
        **given,
        **({} if attention is None else {"attention_factor": attention}),
    }


def _llama3(header: GgufHeader, said: Mapping[str, Any], found: np.ndarray, original: int | None) -> dict[str, Any]:
    factor = float(found.max())
    for length, high in itertools.product((original, _ORIGINAL_LLAMA3), _HIGH):
        rope = {"factor": factor, "low_freq_factor": _LOW, "high_freq_factor": high}
        if length and math.isfinite(factor) and factor >= 1:
            rope["original_max_position_embeddings"] = length
            wanted = llama3_frequencies(rope, said.get("rope_theta", 10000.0), said["head_dim"])
            if wanted.shape == found.shape and np.allclose(wanted, found, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", **rope}
    raise UserError(
        f"{header.path}: the factors in {FREQUENCIES} are not those of RoPE type llama3 with low_freq_factor={_LOW}, "
        f"high_freq_factor=4.0 or 1.0 and the original length {original or _ORIGINAL_LLAMA3}; others are not supported"
    )


def llama3_frequencies(rope: Mapping[str, Any], theta: float, head: int) -> np.ndarray:
    """Returns the divisor of each frequency of a head under RoPE type llama3, float32 [head / 2].

    Source: transformers, `_compute_llama3_parameters`.
    """
    lengths = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)  # wavelengths
    original, low, high = (rope[name] for name in (_POSITIONS, "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((original / lengths - low) / max(high - low, 1e-9), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


_POSITIONS = "original_max_position_embeddings"


def written_fields(hf: HuggingFace, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the GGUF keys and values for `data`, the content of a config.json that this trainer writes."""
    it = hf.gguf
    assert it
    found: dict[str, Any] = {name: data.get(field) for name, field in it.sizes.items()}
    found |= {name: None if data.get(field) is None else float(data[field]) for name, field in it.numbers.items()}
    found["vocab_size"] = data["vocab_size"]
    if not hf.latent:
        rotated = round(data["head_dim"] * data.get("partial_rotary_factor", 1))
        found |= {_VALUES: data["head_dim"], _ROTATED: rotated}
    found |= it.write(data)
    rope = data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind:
        found[_ORIGINAL] = rope.get(_POSITIONS) or data.get(_POSITIONS)
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                found[f"{_SCALING}yarn_{name}"] = float(rope[name])
    if kind in ("linear", "yarn"):
        found |= {f"{_SCALING}type": kind, f"{_SCALING}factor": float(rope["factor"])}
    if kind == "longrope":
        factor = rope.get("factor") or data["max_position_embeddings"] / data[_POSITIONS]
        usual = math.sqrt(1 + math.log(factor) / math.log(data[_POSITIONS]))
        found[ATTENTION] = float(rope.get("attention_factor", usual))
    if rope.get("mscale_all_dim"):
        found[LOG] = 0.1 * rope["mscale_all_dim"]
    return {f"{it.name}.{name}": value for name, value in found.items() if value is not None}


def written_factors(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors in `FACTORS`, float32 [n], for `data`, the content of a config.json from this trainer."""
    rope = data.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        return {FREQUENCIES: llama3_frequencies(rope, data["rope_theta"], data["head_dim"])}
    lists = {LONG: rope.get("long_factor"), SHORT: rope.get("short_factor")}
    return {name: np.array(values, np.float32) for name, values in lists.items() if values}


def shortest(value: float | None) -> float | None:
    """Returns the shortest decimal number that equals `value` in float32: 1e-5, not 9.999999747e-06."""
    return None if value is None else float(str(np.float32(value)))

"""Reads and writes the RoPE fields of config.json."""

import math
from collections.abc import Mapping
from typing import Any

from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.capabilities.windows import has_window
from trainer.config.errors import shortened
from trainer.config.keys import Config
from trainer.models.huggingface import HuggingFace
from trainer.weights.huggingface.config_fields import KINDS_OF_LAYERS

_FULL, _SLIDING = KINDS_OF_LAYERS
THETA = "rope_theta"
# Maps Hugging Face's RoPE types to ours. "su" is the old name of longrope.
_TYPES = {
    **{"default": "default", "linear": "default", "llama3": "llama3.1", "yarn": "yarn"},
    **{"longrope": "longrope", "su": "longrope"},
}
# The required and the optional RoPE fields, by type. original_max_position_embeddings is always optional.
_WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    **dict.fromkeys(("longrope", "su"), (("short_factor", "long_factor"), ("factor", "attention_factor"))),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")),
}


def rope_keys(said: Mapping[str, Any], hf: HuggingFace, refused: list[str]) -> dict[str, Any]:
    """Returns our RoPE keys for the config.json `said`. Appends to `refused` a line for each value that cannot be
    represented. transformers 5 writes one RoPE object for each kind of layer if the kinds rotate differently."""
    each = said.get("rope_parameters") or {}
    if not {_FULL, _SLIDING}.intersection(each):
        keys = _rope_of(said, hf, refused)
        local = said.get(hf.local_rope) if hf.local_rope else None
        if hf.local_rope and each and not said.get("rope_scaling"):  # transformers 5.24 ignores such rope_parameters
            refused.append(f"rope_parameters without {_FULL} and {_SLIDING}")
    else:
        outside = {name: value for name, value in said.items() if name not in ("rope_parameters", "rope_theta")}
        theta = said.get("rope_theta") or 10000
        keys = _rope_of({"rope_theta": theta, **outside, "rope_parameters": each.get(_FULL) or {}}, hf, refused)
        inner = each.get(_SLIDING) or {}
        local = inner.get("rope_theta") or said.get(hf.local_rope or "rope_theta")
        if inner.get("rope_type", "default") != "default" or inner.keys() - {"rope_type", "rope_theta"}:
            refused.append(f"rope_parameters.{_SLIDING}={shortened(str(inner))} (known: rope_theta, without scaling)")
        if not hf.local_rope and each.get(_FULL) != inner:
            refused.append("rope_parameters that differ between kinds of layers")
            local = None
    if local is None or not keys:
        return keys
    if not keys.get("rope_truncate", True):  # transformers 5.24 ignores truncate in rope_parameters of kinds of layers
        refused.append("truncate=false in RoPE type yarn")
    if local != int(local):
        refused.append(
            f"the RoPE of layers with a window has the base {local} (local_rope_max_timescale is an integer)"
        )
    scaled = keys["rope_type"] != "default" or keys["rope_linear_scaling_factor"] != 1
    return keys | ({"local_rope_max_timescale": int(local)} if scaled or local != keys["rope_max_timescale"] else {})


def rope_types(hf: HuggingFace) -> list[str]:
    """Returns our names of the RoPE types that a family supports in transformers."""
    return [_TYPES[kind] for kind in hf.ropes or [kind for kind in _TYPES if _TYPES[kind] != "longrope"]]


def _rope_of(said: Mapping[str, Any], hf: HuggingFace, refused: list[str]) -> dict[str, Any]:
    rope = dict(said.get("rope_scaling") or said.get("rope_parameters") or {})
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", None) or said.get("rope_theta") or 10000
    known = hf.ropes or [name for name in _TYPES if _TYPES[name] in rope_types(hf)]
    if kind not in known:
        refused.append(f"rope_type={shortened(kind)} (known: {', '.join(known)})")
        return {}
    if theta != int(theta):
        refused.append(f"rope_theta={theta} (rope_max_timescale is an integer)")
    shares = [rope.pop("partial_rotary_factor", None), said.get("partial_rotary_factor")]
    usual = _share_of_latents(said) if hf.whole_heads_of_latents else 1
    if set(shares) - {None, usual} and not hf.partial:
        refused.append(f"partial_rotary_factor other than {usual:g}")
    own = {ours: float(rope[field]) for ours, field in hf.rope_sizes.items() if rope.get(field) is not None}
    rope = {name: it for name, it in rope.items() if name not in (*hf.rope_sizes.values(), *hf.rope_ignored)}
    needed, allowed = _WORDS[kind]
    if unknown := sorted(rope.keys() - {*needed, *allowed, "original_max_position_embeddings"}):
        refused.append(f"{shortened(', '.join(unknown))} in RoPE type {kind}")
    if lacking := [name for name in needed if rope.get(name) is None]:
        refused.append(f"RoPE type {kind} requires {', '.join(lacking)}")
        return {}
    keys: dict[str, Any] = {
        "rope_type": _TYPES[kind],
        "rope_min_timescale": 1,
        "rope_max_timescale": int(theta),
        **own,
        **({"partial_rotary_factor": float(next((it for it in shares if it is not None), 1))} if hf.partial else {}),
    }
    if _TYPES[kind] == "default":
        return keys | {"rope_linear_scaling_factor": float(rope.get("factor") or 1.0)}
    lengths = [length for at in (rope, said) if (length := at.get("original_max_position_embeddings"))]
    if len(set(lengths)) > 1:
        refused.append(f"two values of original_max_position_embeddings, {lengths[0]} in RoPE and {lengths[1]}")
    original = next(iter(lengths), None) or said.get("max_position_embeddings")
    if original is None:
        refused.append(f"RoPE type {kind} requires original_max_position_embeddings or max_position_embeddings")
        return {}
    if _TYPES[kind] == "longrope":
        return keys | _longrope(said, rope, original, refused)
    keys |= {"rope_factor": float(rope["factor"]), "original_max_position_embeddings": original}
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return keys | {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
    return keys | {
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "rope_truncate": bool(rope.get("truncate", True)),
        "rope_attention_scaling": _scales_attention(rope, refused),
    }


def _share_of_latents(said: Mapping[str, Any]) -> float:
    rotated: int = said["qk_rope_head_dim"]
    return rotated / (said["qk_nope_head_dim"] + rotated)


def _longrope(said: Mapping[str, Any], rope: Mapping[str, Any], original: int, refused: list[str]) -> dict[str, Any]:
    longest = said.get("max_position_embeddings") or 0
    if not (factor := rope.get("factor") or longest / original):
        refused.append("RoPE type longrope requires factor or max_position_embeddings")
        return {}
    if factor < 1 or original < 2:
        refused.append(f"longrope with factor={factor:.6g}, original length {original} (known: at least 1, at least 2)")
        return {}
    usual, given = math.sqrt(1 + math.log(factor) / math.log(original)), rope.get("attention_factor")
    if given not in (None, 1) and not math.isclose(given, usual, rel_tol=1e-6):
        refused.append(f"attention_factor={given:.6g} of longrope (known: 1, and {usual:.6g} for its factor)")
    return {
        "rope_factor": float(factor),
        "original_max_position_embeddings": original,
        "rope_short_factor": tuple(map(float, rope["short_factor"])),
        "rope_long_factor": tuple(map(float, rope["long_factor"])),
        "rope_attention_scaling": given != 1 or usual == 1,
    }


def _scales_attention(rope: Mapping[str, Any], refused: list[str]) -> bool:
    """Returns True if YaRN scales queries and keys by the paper's factor (Peng et al. 2023, arXiv:2309.00071), and
    False if it does not scale them. Appends a line to `refused` if they have any other factor."""
    usual = _yarn_scale(rope["factor"])
    factor = rope.get("attention_factor")
    if factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        factor = _yarn_scale(rope["factor"], rope["mscale"]) / _yarn_scale(rope["factor"], rope["mscale_all_dim"])
    elif factor is None:
        factor = usual
    if factor == 1:
        return False
    if not math.isclose(factor, usual, rel_tol=1e-6):
        refused.append(f"YaRN's attention_factor={factor:.6g} (known: 1, and {usual:.6g} for its factor)")
    return True


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_fields(hf: HuggingFace, config: Config) -> dict[str, Any]:
    """Returns the RoPE fields of a resolved configuration, in a form that every version of transformers reads: the
    inverse of `rope_keys`. If the family has a separate RoPE base for each kind of layer, rope_parameters contains an
    object for each kind."""
    theta, scaling = float(config.rope_max_timescale), _rope_scaling(config)
    if scaling and hf.rope_sizes:
        scaling |= {field: config[ours] for ours, field in hf.rope_sizes.items()}
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    if hf.partial:
        fields["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_type == "longrope":  # transformers 4 does not allow this field in rope_scaling
        fields["original_max_position_embeddings"] = config.original_max_position_embeddings
    if not hf.local_rope:
        return fields
    local = float(config.local_rope_max_timescale if config.local_rope_max_timescale > 0 else theta)
    full = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    each = {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {**fields, hf.local_rope: local, "rope_parameters": each}


def _rope_scaling(config: Config) -> dict[str, Any] | None:
    if config.rope_type == "default":
        factor = config.rope_linear_scaling_factor
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if config.rope_type == "longrope":
        factors = {f"{name}_factor": list(config[f"rope_{name}_factor"]) for name in ("short", "long")}
        own = {} if config.rope_attention_scaling else {"attention_factor": 1.0}
        return {"type": "longrope", **factors, **own}
    scaling = {
        "rope_type": {ours: name for name, ours in _TYPES.items()}[config.rope_type],
        "factor": config.rope_factor,
        "original_max_position_embeddings": config.original_max_position_embeddings,
    }
    if config.rope_type == "llama3.1":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        return scaling | {"low_freq_factor": low, "high_freq_factor": high}
    scaling |= {"beta_fast": config.beta_fast, "beta_slow": config.beta_slow, "truncate": config.rope_truncate}
    if is_latent(config) and config.mscale:
        scaling |= {"mscale": config.mscale, "mscale_all_dim": config.mscale}
        if config.rope_attention_scaling:
            scaling["attention_factor"] = _yarn_scale(config.rope_factor)
    return scaling if config.rope_attention_scaling else scaling | {"attention_factor": 1.0}


def can_rotate(hf: HuggingFace, config: Config) -> bool:
    """Returns whether config.json can represent the RoPE of layers with a window."""
    if not has_window(config):
        return True
    local, theta = config.local_rope_max_timescale, config.rope_max_timescale
    plain = config.rope_type == "default" and config.rope_linear_scaling_factor == 1
    if not hf.local_rope:
        return local == -1 or (plain and local == theta)
    return (plain if local == -1 else True) and (hf.local_rope != "rope_theta" or local in (-1, theta))

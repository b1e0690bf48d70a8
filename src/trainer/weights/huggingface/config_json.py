"""Reads and writes config.json. Checked against transformers 5.23; 4.x reads and writes the same files."""

from collections.abc import Mapping
from typing import Any

from trainer.config.capabilities.expert_keys import dense_layers
from trainer.config.capabilities.latent_keys import TYPE
from trainer.config.capabilities.windows import has_window, period
from trainer.config.errors import UserError, shortened
from trainer.config.family import MULTIPLIERS
from trainer.config.json_files import shown
from trainer.config.keys import Config
from trainer.config.limits import PERIOD
from trainer.config.schema import schema
from trainer.config.values import check
from trainer.models import FAMILIES
from trainer.models.families import family, hugging_face
from trainer.models.huggingface import HuggingFace
from trainer.models.mtp_names import module_problem
from trainer.weights.huggingface.config_fields import (
    COUNTS,
    KIND_OF,
    KINDS_OF_LAYERS,
    SIZES,
    as_typed,
    mistyped,
    power_of,
    unknown_fields,
)
from trainer.weights.huggingface.quantization_config import recipe
from trainer.weights.huggingface.rope_fields import THETA, can_rotate, rope_fields, rope_keys, rope_types

# Maps Hugging Face's names of activations to ours. Its "gelu" is the exact GELU, which base.yml cannot express.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "linear",
}
_FULL, _SLIDING = KINDS_OF_LAYERS
_MODULES = ("num_mtp_layers", "num_nextn_predict_layers")  # alternative names of one field


def model_keys(data: Mapping[str, Any], where: str, decoder_block: str = "") -> dict[str, Any]:
    """Returns the keys of base.yml and their values for the config.json `data`. Keys without effect are left out.

    Args:
      data: the parsed config.json, with `rope_theta` and `rope_scaling`, or with transformers 5's `rope_parameters`.
      where: the path of config.json, for messages.
      decoder_block: the configured family, by name or import path; "" if none is configured.

    Raises:
      UserError: lists all missing fields of `data`, and all fields that no key can represent.
    """
    _check_types(data, where)
    block, hf = declaration(data, where, decoder_block)
    _check_types(data, where, hf)
    # A null RoPE base counts as absent.
    bases = (THETA, hf.local_rope)
    stated = {name: value for name, value in data.items() if value is not None or name not in bases}
    said = {hf.epsilon: 1e-6, hf.activation: "silu", **hf.defaults, **stated}
    sizes = _sizes(hf, said, data)
    if lacking := [name for name in sizes.values() if name not in said]:
        raise UserError(f"{where}: has no number for {', '.join(lacking)}")
    refused = _switched_on(hf, said) + _contradicting_counts(hf, data) + unknown_fields(hf, data)
    recipe(data, refused)
    keys = {ours: _or_default(ours, said[theirs]) for ours, theirs in sizes.items()}
    keys |= {ours: _or_default(ours, power_of(said.get(field), power)) for ours, (field, power) in hf.powers.items()}
    keys |= hf.implies
    keys |= _latent_keys(hf, said, refused) if hf.latent else {}
    keys |= _group_keys(hf, said, refused) if any(hf.methods) else {}
    keys |= {"decoder_block": block, **_block_keys(hf, said, sizes, refused)}
    keys |= {**_window_keys(said, hf, refused), **rope_keys(said, hf, refused), **hf.read(said, refused)}
    if hf.latent:
        keys["attention_type"] = TYPE
        if keys.get("rope_type") == "yarn":
            keys["mscale"] = float((said.get("rope_scaling") or said["rope_parameters"]).get("mscale_all_dim") or 0)
    _drop_idle(keys, hf)
    refused += [
        f"{name}={keys[name]}: {problem}; allowed: {key.allowed}"
        for name, key in schema().keys.items()
        if name in keys and (problem := check(key, keys[name]))
    ]
    if refused:
        raise UserError("\n  ".join([f"{where}: has fields that cannot be represented here:", *refused]))
    return keys


def _block_keys(
    hf: HuggingFace, said: Mapping[str, Any], sizes: Mapping[str, str], refused: list[str]
) -> dict[str, Any]:
    """Returns the keys of heads, norms, activations and the output. `sizes`: the result of `_sizes`."""
    heads = said["num_attention_heads"]
    keys: dict[str, Any] = {
        "base_num_kv_heads": said.get("num_key_value_heads") or heads,
        "logits_via_embedding": bool(said.get("tie_word_embeddings", False)),
        "normalization_layer_epsilon": float(said[hf.epsilon]),
        **{name: 0.0 for name in ("attn_logits_soft_cap", "final_logits_soft_cap") if name not in sizes},
        **({} if "use_qk_norm" in sizes else {"use_qk_norm": hf.qk_norm}),
        "mtp_num_layers": next((said[it] for it in (*_MODULES, hf.mtp.field) if said.get(it) is not None), 0),
    }
    if not hf.latent:
        keys["head_dim"] = said.get("head_dim") or said["hidden_size"] // heads
    if keys["logits_via_embedding"]:
        keys["normalize_embedding_logits"] = False
    activations, activation = {**ACTIVATIONS, **hf.activations}, said[hf.activation]
    if activation in activations:
        keys["mlp_activations"] = (activations[activation], "linear")
    else:
        refused.append(f"{hf.activation}={shortened(activation or 'null')} (known: {', '.join(activations)})")
    return keys


def _drop_idle(keys: dict[str, Any], hf: HuggingFace) -> None:
    """Removes keys that have no effect given the other keys."""
    if keys.get("attention_type") == "global" and hf.window == "given":  # `read` of `hf` may have set "global"
        keys.pop("sliding_window_size", None)
    if keys.get("query_pre_attn_scalar") == keys.get("head_dim"):
        keys.pop("query_pre_attn_scalar", None)
    if "num_experts" in hf.sizes and not dense_layers(
        Config({"first_num_dense_layers": 0, "interleave_moe_layer_step": 1, **keys})
    ):
        keys.pop("base_mlp_dim", None)  # no layer has an MLP
    if keys.get("interleave_moe_layer_step") == 1:
        del keys["interleave_moe_layer_step"]


def _check_types(data: Mapping[str, Any], where: str, hf: HuggingFace | None = None) -> None:
    if wrong := mistyped(data, hf):
        raise UserError("\n  ".join([f"{where}: values that are not allowed in config.json:", *wrong]))


def declarations(decoder_block: str = "") -> list[tuple[str, HuggingFace]]:
    """Returns a pair (decoder_block, declaration) for each declaration of a family. The families are those of this
    package and, if `decoder_block` is an import path, the family at this path."""
    own = [decoder_block] if ":" in decoder_block and family(decoder_block).hugging_face else []
    return [(block, hf) for block in [*FAMILIES, *own] for hf in family(block).hugging_face]


def declaration(data: Mapping[str, Any], where: str, decoder_block: str) -> tuple[str, HuggingFace]:
    """Returns the decoder_block of the family that declares the model type of `data`, and the declaration of this type.
    Arguments: see `model_keys`.

    Raises:
      UserError: no family declares the model type.
    """
    declared = declarations(decoder_block)
    known = {name: (block, hf) for block, hf in declared for name in (hf.model_type, *hf.aliases)}
    if data.get("model_type", "") not in known:
        given = shortened(data.get("model_type", "(absent)"))
        if isinstance(data.get("text_config"), Mapping):
            others = [name for name in data if name.endswith("_config")]
            raise UserError(
                f"{where}: model_type={given} is more than a text model: it has {shortened(', '.join(others))}; "
                f"types whose text model is read: {', '.join(it.model_type for _, hf in declared for it in hf.outers)}"
            )
        raise UserError(
            f"{where}: model_type={given} is not known; known: {', '.join(known)}; for a family of your own, give "
            "decoder_block=package.module:NAME, a Family whose hugging_face declares this model_type"
        )
    return known[data["model_type"]]


def _switched_on(hf: HuggingFace, said: Mapping[str, Any]) -> list[str]:
    """Returns FIELD=VALUE for each field that enables a feature that base.yml has no key for."""
    names = [name for name in ("attention_bias", "mlp_bias") if said.get(name) and name not in hf.sizes.values()]
    names += [name for name, only in hf.only.items() if said.get(name) not in (None, only)]
    names += [name for name in hf.off if said.get(name)]
    names += ["use_sliding_window"] if said.get("use_sliding_window") and hf.window != "switched" else []
    names += [] if said.get("is_causal", True) else ["is_causal"]
    return [f"{name}={shown(said[name])}" for name in dict.fromkeys(names)]


def _contradicting_counts(hf: HuggingFace, data: Mapping[str, Any]) -> list[str]:
    given = {name: data[name] for name in COUNTS if name in data and "num_experts" in hf.sizes}
    return [] if len(set(given.values())) < 2 else [" and ".join(f"{name}={value}" for name, value in given.items())]


def _sizes(hf: HuggingFace, said: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, str]:
    """Returns a dict from each of our keys for sizes to the name of the field in `said` that contains its value. `said`
    is the config.json `data` with defaults filled in. For a family with experts, base_mlp_dim is included only if the
    declaration `hf` lists it."""
    own = dict(hf.sizes)
    if "num_experts" in own and own["num_experts"] not in data:
        own["num_experts"] = next((name for name in COUNTS if name in data), own["num_experts"])
    experts = "num_experts" in own
    return {ours: theirs for theirs, ours in SIZES.items() if not experts or ours != "base_mlp_dim"} | own


def _or_default(key: str, value: Any) -> Any:
    """Returns `value`, or our key's typed default if it is None."""
    default = schema().keys[key].default
    return default if value is None else float(value) if isinstance(default, float) else value


def _latent_keys(hf: HuggingFace, said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """Returns the keys of multi-head latent attention that are not simply copied from a field. Appends a line to
    `refused` if head_dim contradicts other fields."""
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")[not hf.whole_heads_of_latents :]
    if said.get("head_dim") not in (None, size := sum(said[part] for part in parts)):
        refused.append(f"head_dim={said['head_dim']}, which is not {' + '.join(parts)}={size}")
    return {"q_lora_rank": said["q_lora_rank"] or 0}


def _group_keys(hf: HuggingFace, said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """Returns the keys of groups of experts."""
    groups, method = said.get("n_group") or 1, said.get("topk_method") or hf.methods[0]
    if method == hf.methods[1] and groups > 1:
        return {"n_routing_groups": groups, "topk_routing_group": said.get("topk_group") or 1}
    if method not in hf.methods:
        refused.append(f"topk_method={shortened(method)} (known: {', '.join(dict.fromkeys(hf.methods))})")
    return {"n_routing_groups": -1}


def _window_keys(said: Mapping[str, Any], hf: HuggingFace, refused: list[str]) -> dict[str, Any]:
    window = said.get("sliding_window") or 0 if hf.window else 0
    full = 0  # the number of layers at the beginning that have full attention; later layers have a window
    if hf.window == "switched":
        window = window if said.get("use_sliding_window") else 0
        full = said.get("max_window_layers", 28)
    layers = said["num_hidden_layers"]
    given = [KIND_OF.get(kind, kind) for kind in said.get("layer_types") or ()]
    if given and len(given) != layers:
        refused.append(f"layer_types of {len(given)} layers with num_hidden_layers={layers}")
        return {}
    if hf.window == "read":
        return {"attention_type": "global"}
    if hf.window == "alternating":
        return _alternating(said, hf, refused)
    if given:
        kinds = set(given)
        if hf.window == "given" and window and kinds != {_SLIDING}:  # transformers ignores these layer_types
            refused.append(f"layer_types of {shortened(' and '.join(sorted(kinds)))} with sliding_window={window}")
    else:
        kinds = {_SLIDING if window and layer >= full else _FULL for layer in (0, layers - 1)}
    if kinds == {_FULL}:
        return {"attention_type": "global"}
    if kinds == {_SLIDING} and window:
        return {"attention_type": "local_sliding", "sliding_window_size": window}
    refused.append(
        f"layers of kinds {shortened(' and '.join(sorted(kinds)))} with sliding_window={said.get('sliding_window')}"
    )
    return {}


def _alternating(said: Mapping[str, Any], hf: HuggingFace, refused: list[str]) -> dict[str, Any]:
    """Returns our keys for sliding windows, with values, for a model in which every n-th layer has no window.

    As in transformers, layer_types takes precedence over the field for n.
    """
    layers, given = said["num_hidden_layers"], said.get("layer_types")
    every = said.get(hf.period_field, hf.period)
    if given and _FULL in given:
        every = given.index(_FULL) + 1
    elif given:  # fewer layers than a period
        every = max(hf.period, layers + 1)
    elif isinstance(every, bool) or not isinstance(every, int) or every < 1:
        refused.append(f"{hf.period_field}={shown(every)} without layer_types")
        return {}
    if given and list(given) != [_FULL if (i + 1) % every == 0 else _SLIDING for i in range(layers)]:
        refused.append(f"layer_types={shortened(str(given))} (known: every n-th is {_FULL}, the others {_SLIDING})")
    if PERIOD < every <= layers:
        refused.append(f"a pattern of {every} layers (known: up to {PERIOD})")
    window = said.get("sliding_window")
    if every > 1 and not window:
        refused.append(f"sliding_window={window} with layers of kind {_SLIDING}")
    return {
        "attention_type": "global",
        "sliding_window_pattern": every,
        **({"sliding_window_size": window} if every > 1 and window else {}),
    }


def config_json(config: Config, dtype: str, neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json for a model with the resolved `config`, whose tensors are written in `dtype`.

    RoPE is written as `rope_theta` and `rope_scaling`, which every version of transformers reads.

    Args:
      neutral: fields to copy unchanged, such as eos_token_id; see `NEUTRAL`.

    Raises:
      UserError: lists every key whose value cannot be represented in config.json.
    """
    hf = hugging_face(config)
    if refused := _inexpressible(config):
        head = f"{hf.architecture} of Hugging Face cannot represent"
        raise UserError("\n  ".join([f"{head}:", *refused]))
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    data = {
        "architectures": [hf.architecture],
        "model_type": hf.model_type,
        **{name: config[ours] for name, ours in SIZES.items()},
        **({"intermediate_size": config.base_moe_mlp_dim} if "num_experts" in hf.sizes else {}),
        **{
            name: _their_size(config, ours)
            for ours, name in hf.sizes.items()
            if ours != "base_mlp_dim" or "num_experts" not in hf.sizes or dense_layers(config)
        },
        **{field: power_of(_told(config, ours), 1 / power) for ours, (field, power) in hf.powers.items()},
        **hf.only,
        **hf.write(config),
        "num_key_value_heads": config.base_num_kv_heads,
        **({"q_lora_rank": config.q_lora_rank or None} if hf.latent else {"head_dim": config.head_dim}),
        **(_group_fields(hf, config) if any(hf.methods) else {}),
        hf.activation: theirs[config.mlp_activations[0]],
        hf.epsilon: config.normalization_layer_epsilon,
        "tie_word_embeddings": config.logits_via_embedding,
        **rope_fields(hf, config),
        "max_position_embeddings": _context_length(config),
        "torch_dtype": dtype,
    }
    window = config.sliding_window_size if has_window(config) else None
    if hf.window not in ("", "read"):
        data["sliding_window"] = window
    if hf.window == "alternating":
        # transformers builds a mask with this window even if no layer uses the mask.
        data["sliding_window"] = window or hf.defaults["sliding_window"]
        every = period(config)
        kinds = [_FULL if (i + 1) % every == 0 else _SLIDING for i in range(config.base_num_decoder_layers)]
        data |= {"layer_types": kinds, **({hf.period_field: every} if hf.period_field else {})}
    if hf.window == "switched":
        data["use_sliding_window"] = window is not None
        data["max_window_layers"] = 0 if window else config.base_num_decoder_layers
    if config.mtp_num_layers or hf.mtp.field in hf.defaults:
        data[hf.mtp.field] = config.mtp_num_layers
    data = {**data, **neutral}
    original = config.original_max_position_embeddings
    if config.rope_type == "longrope" and data["max_position_embeddings"] / original != config.rope_factor:
        data["rope_scaling"]["factor"] = config.rope_factor  # transformers 5 reads this field
    return as_typed(data)


def _context_length(config: Config) -> int:
    """Returns the model's maximum text length if its keys define one, otherwise the row length."""
    if config.rope_type == "default":
        return config.max_target_length
    return round(config.rope_factor * config.original_max_position_embeddings)


def length_notes(config: Config, neutral: Mapping[str, Any]) -> list[str]:
    """Returns a line if the max_position_embeddings written by `config_json` is a guess or ambiguous."""
    said, length = neutral.get("max_position_embeddings"), _context_length(config)
    if said is None and config.rope_type == "default":
        return [
            f"max_position_embeddings={length} is written, which is the row length, because the maximum text length of "
            "the model is unknown; max_target_length=... sets it"
        ]
    if config.rope_type == "yarn" and said is not None and said != length:
        original = config.original_max_position_embeddings
        return [
            f"warning: max_position_embeddings={said} is not rope_factor * original_max_position_embeddings = "
            f"{length}: transformers 4 uses {said / original:g} as the factor; max_target_length={length} makes "
            "them agree"
        ]
    return []


# Keys that turn a feature off if they are 0; config.json uses null for this.
_CAPS = ("attn_logits_soft_cap", "final_logits_soft_cap")
_NONE = (*_CAPS, "chunk_attn_window_size")


def _told(config: Config, key: str) -> Any:
    return config.head_dim if key == "query_pre_attn_scalar" and not config[key] else config[key]


def _their_size(config: Config, key: str) -> Any:
    value = _told(config, key)
    if key == "query_pre_attn_scalar":
        return int(value)
    return None if key in _NONE and not value else value


def _group_fields(hf: HuggingFace, config: Config) -> dict[str, Any]:
    """Inverts `_group_keys`."""
    grouped = config.n_routing_groups > 1
    return {
        "topk_method": hf.methods[grouped],
        "n_group": config.n_routing_groups if grouped else 1,
        "topk_group": config.topk_routing_group if grouped else 1,
    }


def _inexpressible(config: Config) -> list[str]:
    """Returns `key=value` for each key that cannot be represented in config.json."""
    hf, activations = hugging_face(config), config.mlp_activations
    gated = len(activations) == 2 and activations[1] == "linear" and activations[0] in ACTIVATIONS.values()
    tied_scaled = config.logits_via_embedding and config.normalize_embedding_logits
    conditions = {
        **{name: config[name] != 0 and name not in hf.sizes for name in _CAPS},
        **{name: config[name] != 1 and name not in {*hf.sizes, *hf.powers} for name in MULTIPLIERS},
        "query_pre_attn_scalar": config.query_pre_attn_scalar not in (0, config.head_dim)
        and "query_pre_attn_scalar" not in hf.powers
        and ("query_pre_attn_scalar" not in hf.sizes or config.query_pre_attn_scalar % 1 != 0),
        "local_rope_max_timescale": not can_rotate(hf, config),
        "rope_truncate": bool(hf.local_rope) and config.rope_type == "yarn" and not config.rope_truncate,
        "mlp_activations": not gated,
        "normalize_embedding_logits": tied_scaled,
        "use_qk_norm": config.use_qk_norm != hf.qk_norm and "use_qk_norm" not in hf.sizes,
        "attention_type": config.attention_type == "local_sliding" and not hf.window,
        "normalization_layer_epsilon": config.normalization_layer_epsilon
        != hf.only.get(hf.epsilon, config.normalization_layer_epsilon),
        "rope_min_timescale": config.rope_min_timescale != 1,
        "rope_type": config.rope_type not in rope_types(hf),
        "rope_linear_scaling_factor": config.rope_type == "default"
        and config.rope_linear_scaling_factor != 1
        and "linear" not in (hf.ropes or ("linear",)),
        "partial_rotary_factor": config.partial_rotary_factor != 1 and not hf.partial,
        "interleave_moe_layer_step": config.interleave_moe_layer_step != 1
        and "interleave_moe_layer_step" not in hf.sizes,
        "base_emb_dim": hf.whole_heads and config.base_emb_dim % config.base_num_query_heads != 0,
    }
    conditions |= dict.fromkeys(hf.contradicted(config), True)
    why = {
        "local_rope_max_timescale": ": in config.json, RoPE in layers with a window is never scaled, and "
        "has a separate base only in some families"
    }
    found = [f"{key}={config[key]}{why.get(key, '')}" for key, refused in conditions.items() if refused]
    return [*found, *filter(None, [module_problem(config, hf.mtp)])]

"""The allowed values of the fields of config.json."""

from collections.abc import Mapping
from typing import Any

from trainer.config import UserError
from trainer.config.json_files import Field, field_problems

# The fields of a model's sizes, with our keys.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
}
_SIZE, _SWITCH = Field(int, low=1), Field(bool, null=True)
_OPTIONAL_SIZE, _OPTIONAL_NUMBER = Field(int, low=1, null=True), Field(float, null=True)
_TOKEN = Field(int, null=True)
# The allowed values in config.json and in its RoPE object. All fields are optional.
_FIELDS = {
    **dict.fromkeys(SIZES, _SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings"), _OPTIONAL_SIZE),
    **{"sliding_window": Field(int, low=0, null=True), "max_window_layers": Field(int, low=0)},
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), Field(int, low=0, null=True)),
    **{"is_causal": Field(bool)},
    **{"rms_norm_eps": Field(float, low=1e-37), "initializer_range": Field(float, low=0, null=True)},
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), _SIZE),
    **dict.fromkeys(("n_routed_experts", "n_shared_experts", "kv_lora_rank", "qk_nope_head_dim"), _SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "v_head_dim", "moe_layer_freq"), _SIZE),
    **dict.fromkeys(("q_lora_rank", "n_group", "topk_group"), _OPTIONAL_SIZE),
    **{"first_k_dense_replace": Field(int, low=0), "routed_scaling_factor": Field(float, low=1e-6)},
    **{"topk_method": Field(str, null=True), "scoring_func": Field(str, null=True)},
    **{"decoder_sparse_step": Field(int, low=1), "mlp_only_layers": Field(list, null=True, item=int)},
    **{"router_jitter_noise": Field(float, low=0, null=True), "norm_topk_prob": Field(bool)},
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"), _SWITCH),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), Field(dict, null=True)),
    **{"bos_token_id": _TOKEN, "eos_token_id": Field(int, null=True, many=True), "pad_token_id": _TOKEN},
    **{"model_type": Field(str), "hidden_act": Field(str), "layer_types": Field(list, null=True, item=str)},
}
_FIELDS_OF_ROPE = {
    **dict.fromkeys(("rope_type", "type"), Field(str, null=True)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), Field(float, low=1e-37, null=True)),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), Field(float, low=0, null=True)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Field(float, low=0, null=True)),
    "truncate": _SWITCH,
}
# RoPE fields that may also be at the top level of config.json.
_FIELDS_OF_BOTH = {
    "rope_theta": Field(float, low=1, high=1e15, null=True),
    "partial_rotary_factor": _OPTIONAL_NUMBER,
    "original_max_position_embeddings": _OPTIONAL_SIZE,
}
_FLOATS = {name for name, field in (_FIELDS | _FIELDS_OF_BOTH).items() if field.kind is float}
# Fields of config.json that do not affect what the model computes.
NEUTRAL = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings")


def neutral_keys(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of `NEUTRAL` that have a value in `data`, a config.json.

    Raises:
      UserError: a value has the wrong type.
    """
    found = {name: data[name] for name in NEUTRAL if data.get(name) is not None}
    if wrong := field_problems(found, _FIELDS):
        raise UserError("\n  ".join([f"{where}: values that are not allowed in config.json:", *wrong]))
    return found


def as_typed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `data`, a config.json, with whole numbers as floats where a field is a number: transformers 5.24 refuses
    an integer there. tests/goldens/declarations.json has its types."""
    return {name: float(value) if name in _FLOATS and isinstance(value, int) else value for name, value in data.items()}


def mistyped(data: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that is not allowed in config.json."""
    wrong = field_problems(data, _FIELDS | _FIELDS_OF_BOTH)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(data.get(name), Mapping):
            wrong += [f"{name}: {line}" for line in field_problems(data[name], _FIELDS_OF_ROPE | _FIELDS_OF_BOTH)]
    return wrong

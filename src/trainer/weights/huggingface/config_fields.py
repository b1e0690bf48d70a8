"""The fields of config.json: the values that each may have, and the fields that do not change a model's results."""

from collections.abc import Collection, Mapping
from typing import Any

from trainer.config.errors import UserError, shortened
from trainer.config.json_files import Field, field_problems, shown
from trainer.config.limits import EXPERTS, LAYERS, MODULES, PERIOD
from trainer.leaves.about import IMAGES, LONGEST, TOKENS
from trainer.models.huggingface import HuggingFace, Outer
from trainer.weights.huggingface.quantization_config import FIELDS as QUANTIZED

# Fields for the number of experts. transformers reads all of them for every family; different versions write different
# ones.
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Fields whose values are not simply copied to one key: fields of multi-head latent attention, and of groups of experts.
_LATENT, _GROUPS = ("q_lora_rank", "rope_interleave", "qk_head_dim"), ("n_group", "topk_group", "topk_method")
# Maps the fields for a model's sizes to our keys.
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
_EPSILON, _POWER = Field(float, low=1e-37), Field(float, low=1e-18, high=1e18, null=True)
# The two values in layer_types: for a layer without an attention window, and for a layer with one.
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
KIND_OF = {"attention": KINDS_OF_LAYERS[0]}  # maps a name that transformers 4 writes to the current name
# The allowed values in config.json and in its RoPE object. All fields are optional.
_FIELDS = {
    **dict.fromkeys(SIZES, _SIZE) | {"num_hidden_layers": Field(int, low=1, high=LAYERS)},
    **dict.fromkeys(("num_key_value_heads", "head_dim", LONGEST), _OPTIONAL_SIZE),
    **{"sliding_window": Field(int, low=0, null=True), "max_window_layers": Field(int, low=0)},
    **dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
        Field(int, low=0, high=MODULES, null=True),
    ),
    **{"is_causal": Field(bool)},
    **{"rms_norm_eps": _EPSILON, "initializer_range": Field(float, low=0, null=True)},
    # 0 means no experts; in a family with experts, it is refused later.
    **dict.fromkeys((*COUNTS, "num_experts_per_tok"), Field(int, low=0, high=EXPERTS)),
    "n_shared_experts": Field(int, low=1, high=EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim"), _SIZE),
    **dict.fromkeys(("qk_rope_head_dim", "v_head_dim"), _SIZE),
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step", "no_rope_layer_interval"), Field(int, 1, PERIOD)),
    **dict.fromkeys(("q_lora_rank", "n_group", "topk_group"), _OPTIONAL_SIZE),
    **{"first_k_dense_replace": Field(int, low=0), "routed_scaling_factor": Field(float, low=1e-6)},
    **{"topk_method": Field(str, null=True), "scoring_func": Field(str, null=True)},
    "mlp_only_layers": Field(list, null=True, item=int),
    **{"mlp_layer_types": Field(list, null=True, item=str), "use_qk_norm": _SWITCH},
    **{"router_jitter_noise": Field(float, low=0, null=True), "norm_topk_prob": Field(bool)},
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"), _SWITCH),
    **dict.fromkeys(("rope_scaling", "rope_parameters", *QUANTIZED), Field(dict, null=True)),
    **dict.fromkeys((*TOKENS, *IMAGES), _TOKEN) | {"eos_token_id": Field(int, null=True, many=True)},
    **{"model_type": Field(str), "hidden_act": Field(str), "layer_types": Field(list, null=True, item=str)},
    **dict.fromkeys(("hidden_activation", "output_gate_type"), Field(str, null=True)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Field(float, low=0, null=True)),
    **{"query_pre_attn_scalar": Field(float, low=1e-37), "rope_local_base_freq": Field(float, low=1, high=1e15)},
    **dict.fromkeys(("no_rope_layers", "moe_layers"), Field(list, null=True, item=int)),
    **{"attention_chunk_size": Field(int, low=0, null=True), "floor_scale": _SIZE, "intermediate_size_mlp": _SIZE},
    **{"attn_scale": Field(float, low=0), "interleave_moe_layer_step": Field(int, 1, PERIOD)},
    "use_qk_norm": Field(bool),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"), _SIZE),
    **dict.fromkeys(("linear_value_head_dim", "shared_expert_intermediate_size"), _SIZE),
    **{"linear_conv_kernel_dim": Field(int, low=2, high=64), "full_attention_interval": Field(int, 1, PERIOD)},
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), Field(float, low=1e-37)),
}
_FIELDS_OF_ROPE = {
    **dict.fromkeys(("rope_type", "type"), Field(str, null=True)),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), Field(float, low=1e-37, null=True)),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), Field(float, low=0, null=True)),
    **dict.fromkeys(("mscale", "mscale_all_dim", "llama_4_scaling_beta"), Field(float, low=0, null=True)),
    "truncate": _SWITCH,
    **dict.fromkeys(("short_factor", "long_factor"), Field(list, null=True, item=float)),
    **dict.fromkeys(KINDS_OF_LAYERS, Field(dict, null=True)),  # a RoPE object for each kind of layer
}
# RoPE fields that may also be at the top level of config.json.
_FIELDS_OF_BOTH = {
    "rope_theta": Field(float, low=1, high=1e15, null=True),
    "partial_rotary_factor": _OPTIONAL_NUMBER,
    "original_max_position_embeddings": _OPTIONAL_SIZE,
}
# Numbers that transformers declares as floats.
_FLOATS = {name for name, field in (_FIELDS | _FIELDS_OF_BOTH).items() if field.kind is float}
_FLOATS -= {"query_pre_attn_scalar"}
# Fields of sampling and of the tokenizer. Without a generation_config.json, transformers reads them from config.json.
_OF_GENERATION = (
    *("tokenizer_class", "use_cache", "cache_implementation", "prefix", "sep_token_id", "decoder_start_token_id"),
    *("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens"),
)
# Fields of config.json that do not affect the model's results, and that an export copies.
NEUTRAL = (*TOKENS, *IMAGES, "initializer_range", LONGEST, *_OF_GENERATION)


# Fields that are read for every model type.
_READ = (
    *("model_type", "num_key_value_heads", "head_dim", "tie_word_embeddings", "layer_types"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("attention_bias", "mlp_bias", "is_causal", *QUANTIZED, "num_nextn_predict_layers", "num_mtp_layers"),
    "use_sliding_window",
)
_WINDOW = {
    "": (),
    "given": ("sliding_window",),
    "switched": ("sliding_window", "max_window_layers"),
    "alternating": ("sliding_window",),
    "read": (),
}
# Fields that do not affect the results of a text model in evaluation: settings of training, of generation, of the
# output, and of the library. Old versions of transformers write many of them.
# fmt: off
_OF_LIBRARY = frozenset(
    (
        "architectures", "auto_map", "_name_or_path", "name_or_path", "transformers_version", "_commit_hash",
        "torch_dtype", "dtype", "use_bfloat16", "attn_implementation", "_attn_implementation",
        "_attn_implementation_autoset", "_attn_implementation_internal", "experts_implementation", "torchscript",
        "tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "return_dict", "output_hidden_states",
        "output_attentions", "output_scores", "output_router_logits", "return_dict_in_generate", "use_return_dict",
        "is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size",
        "tie_encoder_decoder", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type",
        "task_specific_params", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
        "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "gradient_checkpointing",
        "max_sequence_length", "neftune_noise_alpha", "unsloth_version", "unsloth_fixed", "transformers.js_config",
    )
)
# fmt: on


def unknown_fields(hf: HuggingFace, data: Mapping[str, Any]) -> list[str]:
    """Returns a line for each field of config.json that has a value, is not read, and is not known to be harmless. Such
    a field may change the model's results."""
    known = {*_READ, *SIZES, *NEUTRAL, *hf.sizes.values(), *hf.only, *hf.off, *hf.ignored, *hf.fields}
    known |= {field for field, _ in hf.powers.values()}
    known |= {
        hf.mtp.field,
        hf.activation,
        hf.epsilon,
        hf.local_rope,
        hf.period_field,
        *_WINDOW[hf.window],
        *_OF_LIBRARY,
    }
    known |= {*COUNTS} if "num_experts" in hf.sizes else set()
    known |= {*(_LATENT if hf.latent else ()), *(_GROUPS if any(hf.methods) else ())}
    return _unknown(known, data)


def unknown_outer_fields(outer: Outer, data: Mapping[str, Any]) -> list[str]:
    """Returns the lines of `unknown_fields` for the fields outside of `text_config` in a multimodal config.json."""
    known = {"model_type", "text_config", "tie_word_embeddings", *outer.fields, *outer.tokens}
    return _unknown({*known, *NEUTRAL, *QUANTIZED, *_OF_LIBRARY}, data)


def _unknown(known: Collection[str], data: Mapping[str, Any]) -> list[str]:
    unknown = {name: value for name, value in data.items() if name not in known and value is not None}
    return [
        f"{shortened(name)}={shown(value)}: not known, so it may change the model's results"
        for name, value in unknown.items()
    ]


def neutral_keys(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields in `NEUTRAL` that have a value in the config.json `data`. A token's field is returned even if
    it is null, which means that the model has no such token.

    Raises:
      UserError: a value has the wrong type.
    """
    found = {name: data[name] for name in NEUTRAL if data.get(name) is not None or (name in TOKENS and name in data)}
    if wrong := field_problems(found, _FIELDS):
        raise UserError("\n  ".join([f"{where}: values that are not allowed in config.json:", *wrong]))
    return found


def as_typed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json `data` with integers converted to floats where transformers 5.24 requires a float.
    tests/goldens/declarations.json has the fields' types."""
    return {name: float(value) if name in _FLOATS and isinstance(value, int) else value for name, value in data.items()}


def power_of(value: float | None, power: float) -> float | None:
    """Returns `value` to the `power`, rounded to 15 digits, so that the inverse power restores it; None for None."""
    return None if value is None else float(f"{value**power:.15g}")


def mistyped(data: Mapping[str, Any], hf: HuggingFace | None = None) -> list[str]:
    """Returns a line for each value in the config.json `data` that is not allowed. `hf`: a declaration with further
    fields to check."""
    own = {**dict.fromkeys((field for field, _ in hf.powers.values()), _POWER), hf.epsilon: _EPSILON} if hf else {}
    wrong = field_problems(data, _FIELDS | _FIELDS_OF_BOTH | own)
    for name in ("rope_scaling", "rope_parameters"):
        rope = data.get(name)
        inner = {f"{name}.{kind}": rope.get(kind) for kind in KINDS_OF_LAYERS} if isinstance(rope, Mapping) else {}
        for where, each in {name: rope, **inner}.items():
            if isinstance(each, Mapping):
                wrong += [f"{where}: {line}" for line in field_problems(each, _FIELDS_OF_ROPE | _FIELDS_OF_BOTH)]
    return wrong

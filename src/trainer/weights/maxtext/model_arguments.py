"""Converts a model's keys to arguments for MaxText's command line. Checked against MaxText 0.2.4 (commit e591f30)
and 0.2.5."""

from typing import Any

from trainer.config.capabilities.expert_keys import has_experts, only_experts
from trainer.config.capabilities.windows import has_window, period
from trainer.config.errors import UserError
from trainer.config.family import MULTIPLIERS
from trainer.config.keys import Config
from trainer.models.families import maxtext
from trainer.models.family import MaxText
from trainer.weights.huggingface.config_json import SIZES

# The constants of RoPE type llama3.1 in MaxText's code.
_LLAMA31 = {
    "rope_factor": 8,
    "rope_low_freq_factor": 1,
    "rope_high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
# Keys that are integers in MaxText. `_WHOLE_YARN` applies only to RoPE type yarn.
_WHOLE = ("rope_min_timescale", "rope_max_timescale")
_WHOLE_YARN = ("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def maxtext_keys(config: Config) -> dict[str, Any]:
    """Returns MaxText's keys for the model of the resolved configuration `config`.

    The keys leave MaxText's `model_name` at its default, unless MaxText's block depends on it.

    Raises:
      UserError: lists every key whose value MaxText's block does not support.
    """
    if refused := _inexpressible(config):
        raise UserError("\n  ".join([f"MaxText's block {config.decoder_block} cannot compute:", *refused]))
    names = ("decoder_block", *SIZES.values(), "base_num_kv_heads", "head_dim", "mlp_activations")
    names += ("normalization_layer_epsilon", "logits_via_embedding", "normalize_embedding_logits", "use_qk_norm")
    names += ("attn_logits_soft_cap", "final_logits_soft_cap", "rope_type", *maxtext(config.decoder_block).keys)
    names += ("local_rope_max_timescale",) if period(config) and config.local_rope_max_timescale != -1 else ()
    keys = {name: config[name] for name in names} | {name: int(config[name]) for name in _WHOLE}
    if has_experts(config):
        keys |= {name: config[name] for name in ("num_experts", "num_experts_per_tok", "base_moe_mlp_dim")}
        keys["norm_topk_prob"] = config.norm_topk_prob
        if only_experts(config):
            keys["base_mlp_dim"] = config.base_moe_mlp_dim
    keys |= maxtext(config.decoder_block).more(config)
    if not config.logits_via_embedding:
        del keys["normalize_embedding_logits"]
    if config.rope_type == "default":
        keys["rope_linear_scaling_factor"] = config.rope_linear_scaling_factor
    if config.rope_type == "yarn":
        keys |= {name: int(config[name]) for name in _WHOLE_YARN}
        keys |= {"rope_truncate": config.rope_truncate, "rope_attention_scaling": config.rope_attention_scaling}
        # rope_interleave determines whether RoPE pairs are adjacent (see `read.in_pairs`), max_position_embeddings the
        # length of MaxText's cos/sin table.
        length = keys["rope_factor"] * keys["original_max_position_embeddings"]
        keys |= {"rope_interleave": maxtext(config.decoder_block).interleaves, "max_position_embeddings": length}
    return keys


def maxtext_notes(config: Config) -> list[str]:
    """Returns a line if MaxText gives the same results only on short texts."""
    if config.attention_type != "local_sliding":
        return []
    return [
        f"warning: MaxText's block {config.decoder_block} ignores attention_type and attends to the whole row: results "
        f"differ for rows longer than sliding_window_size={config.sliding_window_size}"
    ]


def _other_rotation(config: Config, there: MaxText) -> list[str]:
    """Returns why MaxText's RoPE differs from ours in layers with a window; [] if it does not differ."""
    if not period(config):
        return ["its block has no layers with a window"]
    if config.rope_type != "default":
        return [f"with rope_type={config.rope_type} all of its layers rotate alike"]
    if there.scales_windows and config.rope_linear_scaling_factor != 1:
        return [
            f"it scales RoPE by rope_linear_scaling_factor={config.rope_linear_scaling_factor} in these layers, too"
        ]
    return []


def _inexpressible(config: Config) -> list[str]:
    refused, there = [], maxtext(config.decoder_block)
    if config.mtp_num_layers:
        refused.append(
            f"mtp_num_layers={config.mtp_num_layers}: its modules read hidden states before the final norm, ours "
            "after it; mtp_num_layers=0 writes the model without them"
        )
    if config.use_qk_norm and not there.norms_heads:
        refused.append("use_qk_norm=True: it has no such norm")
    if config.attn_logits_soft_cap and not there.caps_scores:
        refused.append(f"attn_logits_soft_cap={config.attn_logits_soft_cap}: it does not read this key")
    if config.query_pre_attn_scalar not in (0, config.head_dim) and not (there.scaled_queries or there.own_scale):
        refused.append(
            f"query_pre_attn_scalar={config.query_pre_attn_scalar}: it always divides scores by the square root "
            "of head_dim"
        )
    if has_window(config) and config.local_rope_max_timescale != -1:
        refused += [
            f"local_rope_max_timescale={config.local_rope_max_timescale}: {why}"
            for why in _other_rotation(config, there)
        ]
    refused += [f"{key}={config[key]}: it has no such factor" for key in MULTIPLIERS if config[key] != 1]
    refused += there.refuses(config)
    if has_experts(config) and config.interleave_moe_layer_step != 1 and not there.interleaves_experts:
        refused.append(
            f"interleave_moe_layer_step={config.interleave_moe_layer_step}: it does not read this key in this block"
        )
    if config.rope_type == "llama3.1":
        refused += [
            f"{name}={config[name]}: {value} is fixed in its code"
            for name, value in _LLAMA31.items()
            if config[name] != value
        ]
    for name in (*_WHOLE, *(_WHOLE_YARN if config.rope_type == "yarn" else ())):
        if config[name] != int(config[name]):
            refused.append(f"{name}={config[name]}: must be an integer in MaxText")
    return refused

"""Checks of the keys for learned positions and fused projections."""

from trainer.config.keys import Config

GPT3 = "gpt3"
ROPE = (
    *("rope_min_timescale", "rope_max_timescale", "rope_type", "rope_linear_scaling_factor", "rope_factor"),
    *("original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor", "beta_fast", "beta_slow"),
    *("rope_truncate", "rope_attention_scaling", "rope_interleave"),
)


def _length(config: Config) -> str | None:
    if config.trainable_position_size == -1 or config.trainable_position_size >= config.max_target_length:
        return None
    return "a row has more positions than the table"


def _positions(config: Config) -> str | None:
    if config.decoder_block != GPT3 or config.trainable_position_size > 0:
        return None
    return "this family has no rotary positions: give the number of learned ones, at least max_target_length"


def _fused(config: Config) -> str | None:
    if not config.fused_qkv or config.decoder_block == GPT3 or ":" in config.decoder_block:
        return None
    return f"this family has separate matrices for queries, keys and values; only {GPT3} can fuse them into one"


def _heads(config: Config) -> str | None:
    if config.decoder_block != GPT3 or not config.fused_qkv or config.base_num_query_heads == config.base_num_kv_heads:
        return None
    return "one fused matrix makes as many keys and values as queries; give equal numbers of heads, or fused_qkv=false"


GPT3_CHECKS = (
    (("trainable_position_size", "max_target_length"), _length),
    (("decoder_block", "trainable_position_size"), _positions),
    (("decoder_block", "fused_qkv"), _fused),
    (("fused_qkv", "base_num_query_heads", "base_num_kv_heads"), _heads),
)

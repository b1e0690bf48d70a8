"""Checks of the attention keys, except for multi-head latent attention (`latent_keys`)."""

from trainer.config.capabilities.windows import needs_window
from trainer.config.dump import to_flow
from trainer.config.family import BLOCK_KEYS, lacks, readers
from trainer.config.key_rows import Check, Inert, Problem, refused
from trainer.config.keys import Config
from trainer.config.numbers import divisors
from trainer.config.schema import schema


def _only_some(key: str) -> Problem:
    def problem(config: Config) -> str | None:
        if to_flow(config[key]) == to_flow(schema().keys[key].default) or not lacks(config, key):
            return None
        return f"this family does not read it; only {readers(key)} can have it"

    return problem


def _heads(config: Config) -> str | None:
    heads, kv_heads = config.base_num_query_heads, config.base_num_kv_heads
    if heads % kv_heads == 0:
        return None
    best = min(divisors(heads), key=lambda n: abs(n - kv_heads))
    return f"the number of query heads must be a multiple of the key-value heads; nearest: base_num_kv_heads={best}"


def _head_dim(config: Config) -> str | None:
    if config.head_dim % 2:
        return f"must be even, since RoPE rotates pairs; nearest: {config.head_dim - 1} or {config.head_dim + 1}"
    return None


def _fused(config: Config) -> str | None:
    if not config.fused_qkv or not lacks(config, "fused_qkv"):
        return None
    return f"this family has separate matrices for queries, keys and values; only {readers('fused_qkv')} can fuse them"


CHECKS: tuple[Check, ...] = (
    (("base_num_query_heads", "base_num_kv_heads"), _heads),
    (("head_dim",), _head_dim),
    (("decoder_block", "fused_qkv"), _fused),
    refused(
        ("decoder_block", "attention_type", "sliding_window_pattern", "sliding_window_size"),
        lambda c: needs_window(c) and not c.sliding_window_size,
        "a sliding window needs at least one token",
    ),
    refused(
        ("rope_min_timescale", "local_rope_max_timescale"),
        lambda c: c.rope_min_timescale >= c.local_rope_max_timescale != -1,
        "the shortest wavelength must be less than the longest",
    ),
    *((("decoder_block", key), _only_some(key)) for key in BLOCK_KEYS),
)
INERT = (
    Inert(("sliding_window_size", "local_rope_max_timescale"), lambda c: not needs_window(c), "no layer has a window"),
)

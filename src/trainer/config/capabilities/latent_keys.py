"""Checks of the keys of multi-head latent attention."""

from trainer.config.family import LATENT, lacks, readers
from trainer.config.key_rows import Check, Inert, refused
from trainer.config.keys import Config

TYPE = "mla"


def is_latent(config: Config) -> bool:
    """Returns whether attention is multi-head latent attention."""
    return config.attention_type == TYPE


def _family(config: Config) -> str | None:
    if is_latent(config) and lacks(config, "kv_lora_rank"):
        return f"this family has no multi-head latent attention; families with it: {readers('kv_lora_rank')}"
    return None


CHECKS: tuple[Check, ...] = (
    (("decoder_block", "attention_type"), _family),
    refused(
        ("base_num_query_heads", "base_num_kv_heads"),
        lambda c: is_latent(c) and c.base_num_query_heads != c.base_num_kv_heads,
        "with attention_type=mla every head has its own keys and values; set both keys to the same number",
    ),
    refused(
        ("qk_rope_head_dim",),
        lambda c: is_latent(c) and c.qk_rope_head_dim % 2,
        "must be even, since RoPE rotates pairs",
    ),
    refused(
        ("attention_type", "use_qk_norm"),
        lambda c: is_latent(c) and c.use_qk_norm,
        "multi-head latent attention normalizes latents, not heads; leave use_qk_norm at false",
    ),
)
INERT = (
    Inert(LATENT, lambda c: not is_latent(c), "attention_type is not mla"),
    Inert(("head_dim",), is_latent, "attention_type=mla reads qk_nope_head_dim, qk_rope_head_dim and v_head_dim"),
    Inert(
        ("mscale",),
        lambda c: not is_latent(c) or c.rope_type != "yarn",
        "it needs attention_type=mla and rope_type=yarn",
    ),
    Inert(("rope_interleave",), is_latent, "attention_type=mla always rotates adjacent pairs"),
    Inert(("query_pre_attn_scalar", "local_rope_max_timescale"), is_latent, "attention_type=mla does not read it"),
)

"""The properties of GPT-3 that the configuration stage needs (`config.family.Facts`)."""

from collections.abc import Mapping
from typing import Any

from trainer.config.family import ROPE, Axes, Facts
from trainer.config.keys import Config
from trainer.config.tensors import TENSORS


def _positions(config: Config) -> str | None:
    if config.trainable_position_size > 0:
        return None
    return "this family has no RoPE: set the number of learned positions to at least max_target_length"


def _heads(config: Config) -> str | None:
    if not config.fused_qkv or config.base_num_query_heads == config.base_num_kv_heads:
        return None
    return "a fused matrix requires as many key-value heads as query heads; set equal numbers, or fused_qkv=false"


def _tensors(config: Mapping[str, Any]) -> dict[str, Axes]:
    """See `Facts.tensors`. With `fused_qkv`, one matrix computes queries, keys and values."""
    own = ("self_attention/query/kernel", "self_attention/key/kernel")
    if not config["fused_qkv"]:
        return TENSORS
    others = {name: axes for name, axes in TENSORS.items() if name not in own}
    return others | {"self_attention/qkv_proj/kernel": TENSORS[own[0]]}


FACTS = Facts(
    "trainer.models.gpt3.family:FAMILY",
    reads=("fused_qkv",),
    ignores={"has no rotary positions": ROPE},
    checks=(
        (("decoder_block", "trainable_position_size"), _positions),
        (("fused_qkv", "base_num_query_heads", "base_num_kv_heads"), _heads),
    ),
    tensors=_tensors,
)

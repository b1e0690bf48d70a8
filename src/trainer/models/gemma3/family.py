"""The text model of Gemma 3 (Google DeepMind 2025, arXiv:2503.19786): Gemma 2's block with norms of queries and keys.
Every sixth layer has no window. The other layers have a window and a separate RoPE."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gemma import family as gemma
from trainer.models.gemma2 import family as gemma2
from trainer.models.gguf import NUMBERS, SIZES, WINDOW, Gguf, scaled_queries
from trainer.models.huggingface import HuggingFace, Outer
from trainer.models.patterns import alternating, other_period
from trainer.models.qwen3.family import NORMS


class Block(gemma2.Block):
    """Gemma 2's block with norms of each head's queries and keys."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, qk_norm_offset=gemma.OFFSET, **given)


def stacks(config: Config) -> list[Stack]:
    """Returns stacks that repeat the family's pattern of layers with and without a window."""
    return alternating(Block, config)


def _named(config: Config) -> str:
    """Returns a model_name for which MaxText uses the attention scale of `config`; "" if no such name exists."""
    scalar, head_dim = config.query_pre_attn_scalar, config.head_dim
    if scalar in (0, head_dim):
        return "gemma3-4b"
    return "gemma3-27b" if scalar == config.base_emb_dim // config.base_num_query_heads else ""


def _maxtext_keys(config: Config) -> dict[str, Any]:
    return {**gemma.maxtext_keys(config), "model_name": _named(config), "override_model_config": True}


def _refuses(config: Config) -> list[str]:
    refused = [*gemma.refuses(config), *other_period(config, 6)]
    if not _named(config):
        scalar = f"query_pre_attn_scalar={config.query_pre_attn_scalar}"
        refused.append(f"{scalar}: MaxText supports only head_dim or base_emb_dim // base_num_query_heads")
    if config.local_rope_max_timescale == -1 and config.rope_linear_scaling_factor != 1:
        refused.append("local_rope_max_timescale=-1: MaxText never scales RoPE in layers with a window")
    return refused


# The defaults of transformers' Gemma3TextConfig. The models 4B to 27B differ from them in a few fields.
NESTED = {
    **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072},
    **{"tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
}
WITH_IMAGES = Outer(
    "gemma3",
    texts=("gemma3_text",),
    towers=("vision_tower", "multi_modal_projector"),
    fields=("vision_config", "mm_tokens_per_image"),
    tokens={"image_token_index": 262_144, "boi_token_index": 255_999, "eoi_token_index": 256_000},
    tied=True,
)

FAMILY = Family(
    stacks,
    forward_flops_per_token,
    embedding_scale=gemma.embedding_scale,
    norm=gemma.Norm,
    hugging_face=[
        HuggingFace(
            "gemma3_text",
            "Gemma3ForCausalLM",
            gemma2.LAYOUTS | NORMS,
            defaults={
                **gemma2.DEFAULTS,
                **{"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "final_logit_softcapping": None},
            },
            activation="hidden_activation",
            qk_norm=True,
            window="alternating",
            period=6,
            period_field="sliding_window_pattern",
            whole_heads=True,
            local_rope="rope_local_base_freq",
            sizes={
                "query_pre_attn_scalar": "query_pre_attn_scalar",
                "final_logits_soft_cap": "final_logit_softcapping",
            },
            ignored=("hidden_act", "_sliding_window_pattern"),
            off=("use_bidirectional_attention", "attn_logit_softcapping"),
            implies=dict.fromkeys(gemma2.POST_NORMS, True),
            nested=NESTED,
            outers=(WITH_IMAGES,),
            gguf=Gguf(
                "gemma3",
                one=True,
                sizes=SIZES | {WINDOW: "sliding_window"},
                numbers=NUMBERS | {"final_logit_softcapping": "final_logit_softcapping"},
                fields=lambda said: {
                    "query_pre_attn_scalar": scaled_queries(said, 62),
                    **{"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
                },
            ),
        )
    ],
    maxtext=MaxText(
        own_scale=True,
        scales_windows=False,
        stored=gemma.stored,
        caps_scores=True,
        norms_heads=True,
        keys=("sliding_window_size", *gemma2.POST_NORMS),
        more=_maxtext_keys,
        refuses=_refuses,
    ),
)

"""Gemma 2 (Google DeepMind 2024, arXiv:2408.00118): Gemma's block with additional norms after attention and MLP. Every
other layer attends within a window. Attention scores and logits have soft caps."""

from typing import Any

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.families import Place
from trainer.models.family import Family, MaxText, Named
from trainer.models.flops import forward_flops_per_token
from trainer.models.gemma import family as gemma
from trainer.models.gguf import NUMBERS, SIZES, WINDOW, Gguf, scaled_queries
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2.block import OuterNorms
from trainer.models.llama2.family import QUERIES
from trainer.models.patterns import alternating, other_period

POST_NORMS = ("use_post_attn_norm", "use_post_ffw_norm")


class Block(OuterNorms, gemma.Block):
    """Computes y = x + norm(attention(norm(x))) and returns dropout(y + norm(mlp(norm(y)))). The keys
    `use_post_attn_norm` and `use_post_ffw_norm` enable the outer norms."""


def stacks(config: Config) -> list[Stack]:
    """Returns stacks in which layers with and without a window alternate."""
    return alternating(Block, config)


_NORM, _LAYER = "decoder/layers/{}/scale", "model.layers.{}."
LAYOUTS = gemma.UNNORMED | {
    _NORM.format("pre_self_attention_norm"): Layout(_LAYER + "input_layernorm.weight"),
    _NORM.format("post_self_attention_norm"): Layout(_LAYER + "post_attention_layernorm.weight"),
    _NORM.format("pre_ffw_norm"): Layout(_LAYER + "pre_feedforward_layernorm.weight"),
    _NORM.format("post_ffw_norm"): Layout(_LAYER + "post_feedforward_layernorm.weight"),
}
DEFAULTS = {
    **{"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 4096},
    **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
}


def _maxtext_keys(config: Config) -> dict[str, Any]:
    """See `MaxText.more`. One MaxText layer is a pair of our layers."""
    return {**gemma.maxtext_keys(config), "base_num_decoder_layers": config.base_num_decoder_layers // 2}


def _maxtext_names(name: str, where: Place) -> Named:
    """See `MaxText.names`. One MaxText layer contains a pair of our layers and names their parts differently."""
    del name
    part, _, rest = where.path.partition("/")
    path = f"{part}_{('local', 'global')[where.layers[0] % 2]}/{rest}"
    return Named(f"decoder/layers/{path}", [f"decoder/layers_{number // 2}/{path}" for number in where.layers])


def _refuses(config: Config) -> list[str]:
    layers = config.base_num_decoder_layers
    odd = [f"base_num_decoder_layers={layers}: MaxText requires an even number"] if layers % 2 else []
    return [*gemma.refuses(config), *other_period(config, 2), *odd]


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    embedding_scale=gemma.embedding_scale,
    norm=gemma.Norm,
    hugging_face=[
        HuggingFace(
            "gemma2",
            "Gemma2ForCausalLM",
            LAYOUTS,
            defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            activation="hidden_activation",
            window="alternating",
            period=2,
            whole_heads=True,
            sizes={
                "query_pre_attn_scalar": "query_pre_attn_scalar",
                "attn_logits_soft_cap": "attn_logit_softcapping",
                "final_logits_soft_cap": "final_logit_softcapping",
            },
            ignored=("hidden_act", "sliding_window_size", "sliding_window_pattern"),
            off=("use_bidirectional_attention",),
            implies=dict.fromkeys(POST_NORMS, True),
            gguf=Gguf(
                "gemma2",
                one=True,
                sizes=SIZES | {WINDOW: "sliding_window"},
                numbers=NUMBERS | {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
                fields=lambda said: {"query_pre_attn_scalar": scaled_queries(said, 46)},
            ),
        )
    ],
    maxtext=MaxText(
        scaled_queries=QUERIES,
        stored=gemma.stored,
        names=_maxtext_names,
        caps_scores=True,
        keys=("sliding_window_size", *POST_NORMS),
        more=_maxtext_keys,
        refuses=_refuses,
    ),
)

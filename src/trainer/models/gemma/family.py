"""Gemma (Google DeepMind 2024, arXiv:2403.08295): Llama's block with norms that multiply by 1 + scale. Embeddings are
multiplied by sqrt(width)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from trainer.config.keys import Config
from trainer.layers.norm import RMSNorm
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS as OF_LLAMA
from trainer.models.llama2.family import QUERIES

OFFSET = 1.0
Norm = functools.partial(RMSNorm, offset=OFFSET)


class Block(llama2.Block):
    """Computes y = x + attention(norm(x)) and returns dropout(y + mlp(norm(y)))."""

    @staticmethod
    def make_norm(width: int, epsilon: float, dtypes: Mapping[str, Any]) -> Any:
        return Norm(width, epsilon=epsilon, **dtypes)

    def add_norms(self, config: Config, norm: Callable[[], Any]) -> None:
        del config
        self.pre_self_attention_norm, self.pre_ffw_norm = norm(), norm()

    def attention_input(self, x_bte: jax.Array) -> jax.Array:
        return self.pre_self_attention_norm(x_bte)

    def feed_forward_input(self, x_bte: jax.Array) -> jax.Array:
        return self.pre_ffw_norm(x_bte)


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


def embedding_scale(config: Config) -> float:
    """Returns the factor by which token embeddings are multiplied, sqrt(width)."""
    return float(config.base_emb_dim**0.5)


def stored(config: Config, name: str) -> tuple[float, float]:
    """See `MaxText.stored`. MaxText stores norms' scales with 1 added, and the embedding table times sqrt(width)."""
    if name.endswith("/scale"):
        return 1.0, OFFSET
    return (1 / embedding_scale(config) if name == "token_embedder/embedding" else 1.0), 0.0


def maxtext_keys(config: Config) -> dict[str, Any]:
    """See `MaxText.more`. With a tied head, MaxText divides the logits by sqrt(width), because the stored table
    contains this factor."""
    del config
    return {"normalize_embedding_logits": True}


def refuses(config: Config) -> list[str]:
    """See `MaxText.refuses`."""
    epsilon = config.normalization_layer_epsilon
    return [] if epsilon == 1e-6 else [f"normalization_layer_epsilon={epsilon}: MaxText always uses 1e-6"]


_NORM, _LAYER = "decoder/layers/{}/scale", "model.layers.{}."
UNNORMED = {name: layout for name, layout in OF_LLAMA.items() if "_layer_norm/" not in name}
LAYOUTS = UNNORMED | {
    _NORM.format("pre_self_attention_norm"): Layout(_LAYER + "input_layernorm.weight"),
    _NORM.format("pre_ffw_norm"): Layout(_LAYER + "post_attention_layernorm.weight"),
}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    embedding_scale=embedding_scale,
    norm=Norm,
    hugging_face=[
        HuggingFace(
            "gemma",
            "GemmaForCausalLM",
            LAYOUTS,
            defaults={
                **{"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
                "hidden_act": "gelu_pytorch_tanh",
            },
            # The config.json files published in 2024 call the tanh approximation gelu.
            activations={"gelu": "gelu"},
            ignored=("hidden_activation",),
            gguf=Gguf("gemma", one=True),
            off=("use_bidirectional_attention",),
        )
    ],
    maxtext=MaxText(scaled_queries=QUERIES, stored=stored, more=maxtext_keys, refuses=refuses),
)

"""gpt-oss (OpenAI 2025, arXiv:2508.10925): every layer has experts with biases and a clamped gated unit; every
other layer attends within a window; every head has an attention sink."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config.keys import Config
from trainer.layers.mlp import Combine
from trainer.layers.stack import Stack
from trainer.models.experts import ExpertBlock, layouts, layouts_in_gguf
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import COUNT, SIZES, USED, WINDOW, Gguf
from trainer.models.gpt_oss.facts import ATTENTION
from trainer.models.huggingface import EACH, HuggingFace, Layout, Merged
from trainer.models.patterns import alternating, other_period
from trainer.models.qwen2.family import BIASES
from trainer.ops.routing import Score, softmax_of_chosen

NAME = "GptOssMlp"
ALPHA = 1.702  # x sigmoid(ALPHA x) approximates GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)


@functools.cache  # NNX compares functions by identity, so models with the same limit must share a function
def clamped(limit: float) -> Combine:
    """Returns the gated unit (up + 1) * gate * sigmoid(ALPHA * gate), which first clips `gate` to at most `limit`, and
    clips `up` to the interval [-limit, limit]."""

    def hidden(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * ALPHA)

    return hidden


class Block(ExpertBlock):
    """Mixtral's block with attention sinks and with biases in experts and routers. With `attention_bias`, attention has
    biases, too."""

    NAME, ATTENTION = NAME, ATTENTION

    @staticmethod
    def score(config: Config) -> Score:
        del config
        return softmax_of_chosen

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, bias=config.attention_bias, sinks=True, **given)

    def make_experts(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        own = {"bias": True, "combine": clamped(config.mlp_activations_limit)}
        return super().make_experts(config, rngs, dtypes, **own, **given)


def stacks(config: Config) -> list[Stack]:
    """Returns stacks that repeat the family's pattern of layers with and without a window."""
    return alternating(Block, config)


def _maxtext_keys(config: Config) -> dict[str, Any]:
    return {
        **{"routed_bias": True, "mlp_bias": True, "attention_sink": True, "capacity_factor": -1.0},
        **{"inhomogeneous_layer_cycle_interval": 2, "mlp_activations": ["sigmoid", "linear"]},
    }


def _maxtext_refuses(config: Config) -> list[str]:
    layers = config.base_num_decoder_layers
    uneven = f"base_num_decoder_layers={layers}: MaxText requires a multiple of 2"
    return [*other_period(config, 2), *([uneven] if layers % 2 else [])]


_OURS, _LAYER, _EXPERTS = "decoder/layers/", "model.layers.{}.", "mlp.experts."
_OF_EXPERTS = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
LAYOUTS = {
    name.replace("/self_attention/", f"/{ATTENTION}/"): layout
    for name, layout in (layouts(NAME, "mlp.router.weight", "", "", "") | BIASES).items()
}
LAYOUTS |= {
    f"{_OURS}{ATTENTION}/out/bias": Layout(f"{_LAYER}self_attn.o_proj.bias"),
    f"{_OURS}{ATTENTION}/sinks": Layout(f"{_LAYER}self_attn.sinks"),
    f"{_OURS}{NAME}/gate/bias": Layout(f"{_LAYER}mlp.router.bias"),
    **{f"{_OURS}{NAME}/{ours}": Layout(f"{_LAYER}{_EXPERTS}{name}") for ours, name in _OF_EXPERTS.items()},
    **{f"{_OURS}{NAME}/{ours}_bias": Layout(f"{_LAYER}{_EXPERTS}{name}_bias") for ours, name in _OF_EXPERTS.items()},
}
_WIDTH = "expert_feed_forward_length"  # a key in GGUF
_IN_GGUF = {
    **layouts_in_gguf(f"{_OURS}{NAME}"),
    **layouts_in_gguf(f"{_OURS}{NAME}", end="_bias", file="bias"),
    f"{_OURS}{ATTENTION}/sinks": Layout(f"{_LAYER}self_attn.sinks.weight"),
}


def _refuses(data: Mapping[str, Any]) -> str:
    """See `Gguf.refuses`. llama.cpp requires attention biases and an untied head."""
    if not data["attention_bias"]:
        return "attention_bias=false: llama.cpp requires attention biases"
    return "tie_word_embeddings=true: llama.cpp requires an untied head" if data["tie_word_embeddings"] else ""


YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_type": "yarn"}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "gpt_oss",
            "GptOssForCausalLM",
            LAYOUTS,
            defaults={
                **{"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000},
                **{"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0},
                **{"attention_bias": True, "rope_parameters": YARN | {"original_max_position_embeddings": 4096}},
            },
            merged=[
                Merged(
                    f"{_EXPERTS}gate_up_proj{end}",
                    [f"{_EXPERTS}{part}_proj{end}" for part in ("gate", "up")],
                    groups=EACH,
                    axis=-1,
                )
                for end in ("", "_bias")
            ],
            window="alternating",
            period=2,
            ropes=("yarn",),  # without rope_parameters, transformers uses the published models' YaRN settings
            sizes={
                "num_experts": "num_local_experts",
                "num_experts_per_tok": "num_experts_per_tok",
                "base_moe_mlp_dim": "intermediate_size",
                "attention_bias": "attention_bias",
                "mlp_activations_limit": "swiglu_limit",
            },
            only={"swiglu_alpha": ALPHA},
            ignored=("experts_per_token", "initial_context_length"),
            gguf=Gguf(
                "gpt-oss",
                when=lambda said: True,
                sizes={
                    **SIZES,
                    **{COUNT: "num_local_experts", USED: "num_experts_per_tok"},
                    WINDOW: "sliding_window",
                },
                more={_WIDTH: int},
                needs=(WINDOW, _WIDTH),
                fields=lambda said: {
                    **{"swiglu_limit": 7.0, "intermediate_size": said[_WIDTH]},
                    "rope_scaling": {**(said["rope_scaling"] or {"rope_type": "default"}), "truncate": False},
                },
                write=lambda data: {_WIDTH: data["intermediate_size"]},
                refuses=_refuses,
                layouts=_IN_GGUF,
                note="it rounds the bounds between which YaRN blends frequencies, as rope_truncate=true does",
            ),
        )
    ],
    maxtext=MaxText(
        interleaves=False,
        keys=("attention_bias", "mlp_activations_limit", "sliding_window_size"),
        more=_maxtext_keys,
        refuses=_maxtext_refuses,
    ),
)

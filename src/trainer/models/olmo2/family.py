"""OLMo 2 (Ai2 2024, arXiv:2501.00656): norms after attention and MLP instead of before them. A token's queries are
normalized over all heads, and so are its keys."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import WINDOW, Gguf
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS as OF_LLAMA


class Block(llama2.Block):
    """Computes y = x + norm(attention(x)) and returns dropout(y + norm(mlp(y))). With `use_qk_norm`, queries and keys
    are normalized over all heads."""

    ATTENTION = "attention"

    def add_norms(self, config: Config, norm: Callable[[], Any]) -> None:
        del config
        self.post_self_attention_layer_norm, self.post_mlp_layer_norm = norm(), norm()

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, qk_norm_over_heads=True, **given)

    def attention_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the residual stream unchanged."""
        return x_bte

    def attention_output(self, h_bte: jax.Array) -> jax.Array:
        return self.post_self_attention_layer_norm(h_bte)

    def feed_forward_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the residual stream unchanged."""
        return x_bte

    def feed_forward_output(self, h_bte: jax.Array) -> jax.Array:
        return self.post_mlp_layer_norm(h_bte)


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


_LAYER, _NORM = "decoder/layers/", "_layer_norm/"
LAYOUTS = {
    name.replace("/self_attention/", "/attention/"): layout for name, layout in OF_LLAMA.items() if _NORM not in name
} | {
    f"{_LAYER}attention/query_norm/scale": Layout("model.layers.{}.self_attn.q_norm.weight", rotated="head_dim"),
    f"{_LAYER}attention/key_norm/scale": Layout("model.layers.{}.self_attn.k_norm.weight", rotated="head_dim"),
    f"{_LAYER}post_self_attention_layer_norm/scale": Layout("model.layers.{}.post_attention_layernorm.weight"),
    f"{_LAYER}post_mlp_layer_norm/scale": Layout("model.layers.{}.post_feedforward_layernorm.weight"),
}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "olmo2",
            "Olmo2ForCausalLM",
            LAYOUTS,
            defaults={"rms_norm_eps": 1e-5},
            qk_norm=True,
            gguf=Gguf("olmo2", when=lambda said: not said(WINDOW)),
        )
    ],
)

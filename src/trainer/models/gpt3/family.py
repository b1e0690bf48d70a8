"""GPT-3 (Brown et al. 2020, arXiv:2005.14165): layer norm, learned positions, biases, and an MLP without a gate.

Attention is dense in every layer, whereas the paper alternates dense and sparse attention. Norms multiply by 1 + scale,
as in MaxText.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from trainer.config.keys import Config
from trainer.layers.mlp import MLP
from trainer.layers.norm import LayerNorm
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.llama2 import block as llama2

KEYS = ("trainable_position_size", "fused_qkv")


class Block(llama2.Block):
    """Computes y = x + attention(norm(x)) and returns dropout(y + mlp(norm(y))). The second norm is part of the MLP.

    With `fused_qkv`, one matrix computes queries, keys and values.
    """

    @staticmethod
    def make_norm(width: int, epsilon: float, dtypes: Mapping[str, Any]) -> Any:
        return LayerNorm(width, epsilon=epsilon, **dtypes)

    def add_norms(self, config: Config, norm: Callable[[], Any]) -> None:
        del config
        self.pre_self_attention_norm = norm()

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        own = {"rope": None, "bias": True, "fused": config.fused_qkv}
        return super().make_attention(config, rngs, dtypes, **{**given, **own})

    def add_feed_forward(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any]) -> None:
        self.mlp = MLP(
            config.base_emb_dim,
            config.base_mlp_dim,
            config.mlp_activations,
            dropout_rate=self.dropout_rate,
            bias=True,
            norm=self.make_norm(config.base_emb_dim, config.normalization_layer_epsilon, dtypes),
            rngs=rngs,
            **dtypes,
        )

    def attention_input(self, x_bte: jax.Array) -> jax.Array:
        return self.pre_self_attention_norm(x_bte)

    def feed_forward_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the residual stream unchanged, because the norm is part of the MLP."""
        return x_bte


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


FAMILY = Family(stacks, forward_flops_per_token, axes={"qkv": ()}, norm=LayerNorm, maxtext=MaxText(keys=KEYS))

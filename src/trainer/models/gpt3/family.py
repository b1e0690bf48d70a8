"""GPT-3 (Brown et al. 2020, arXiv:2005.14165): layer norm, learned positions, biases, an MLP without a gate.

Attention is dense in every layer. The stored scale of a norm is added to 1, as in MaxText.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config import Config
from trainer.config.tiles import tiles_of
from trainer.layers.attention import Attention
from trainer.layers.mlp import MLP
from trainer.layers.norm import LayerNorm
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.llama2 import block as llama2

KEYS = ("trainable_position_size", "fused_qkv")


class Block(llama2.Block):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)), then dropout. The norm of the MLP belongs to the MLP.

    With `fused_qkv`, one matrix computes queries, keys and values.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        width, epsilon = config.base_emb_dim, config.normalization_layer_epsilon
        norm = functools.partial(LayerNorm, width, epsilon=epsilon, **dtypes)
        on = config.enable_dropout
        self.dropout_rate = config.dropout_rate if on else 0.0

        self.pre_self_attention_norm = norm()
        self.self_attention = Attention(
            width,
            heads=config.base_num_query_heads,
            kv_heads=config.base_num_kv_heads,
            head_dim=config.head_dim,
            rope=None,
            op=config.attention,
            window=config.sliding_window_size if config.attention_type == "local_sliding" else 0,
            soft_cap=config.attn_logits_soft_cap,
            tiles=tiles_of(config),
            qk_norm_epsilon=epsilon if config.use_qk_norm else None,
            dropout_rate=config.attention_dropout_rate if on else 0.0,
            bias=True,
            fused=config.fused_qkv,
            rngs=rngs,
            **dtypes,
        )
        self.mlp = MLP(
            width,
            config.base_mlp_dim,
            config.mlp_activations,
            dropout_rate=self.dropout_rate,
            bias=True,
            norm=norm(),
            rngs=rngs,
            **dtypes,
        )

    def attention_input(self, x_bte: jax.Array) -> jax.Array:
        """See `llama2.Block.attention_input`."""
        return self.pre_self_attention_norm(x_bte)

    def feed_forward_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the residual stream unchanged: the MLP normalizes it itself."""
        return x_bte


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


FAMILY = Family(stacks, forward_flops_per_token, axes={"qkv": ()}, norm=LayerNorm, maxtext=MaxText(keys=KEYS))

"""A custom model family: attention and MLP have the same normalized input (GPT-J, Wang & Komatsuzaki 2021).

An example for docs/guides/extending.md. Select it by import path:

    python -m trainer.train base.yml decoder_block=docs.guides.own_family:FAMILY
"""

import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.config.capabilities.splash_tiles import tiles_of
from trainer.layers.attention import Attention
from trainer.layers.dense import RESIDUAL
from trainer.layers.mlp import MLP
from trainer.layers.norm import RMSNorm
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.llama2.block import make_rope
from trainer.ops.dropout import dropout

# The places in a block that apply dropout, each with a separate mask.
ATTENTION, HIDDEN, OUTPUT = range(3)


class ParallelBlock(nnx.Module):
    """Computes x + attention(norm(x)) + mlp(norm(x)), then dropout."""

    def __init__(self, config, rngs: nnx.Rngs):
        dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        width, on = config.base_emb_dim, config.enable_dropout
        self.dropout_rate = config.dropout_rate if on else 0.0
        self.norm = RMSNorm(width, epsilon=config.normalization_layer_epsilon, **dtypes)
        self.self_attention = Attention(
            width,
            heads=config.base_num_query_heads,
            kv_heads=config.base_num_kv_heads,
            head_dim=config.head_dim,
            rope=make_rope(config),
            op=config.attention,
            window=config.sliding_window_size if config.attention_type == "local_sliding" else 0,
            soft_cap=config.attn_logits_soft_cap,
            tiles=tiles_of(config),
            qk_norm_epsilon=config.normalization_layer_epsilon if config.use_qk_norm else None,
            dropout_rate=config.attention_dropout_rate if on else 0.0,
            rngs=rngs,
            **dtypes,
        )
        self.mlp = MLP(
            width, config.base_mlp_dim, config.mlp_activations, dropout_rate=self.dropout_rate, rngs=rngs, **dtypes
        )

    def init_cache(self, rows: int, length: int):
        """Returns an empty key-value cache of this layer for sampling."""
        return self.self_attention.init_cache(rows, length)

    def __call__(self, x_bte, cache, context):
        """Returns the layer's output, [b, t, e] -> [b, t, e], and the cache with keys and values added."""
        h = self.norm(x_bte)
        attended, cache = self.self_attention(h, cache, context.at(ATTENTION))
        h = attended + self.mlp(h, context.at(HIDDEN))
        out = dropout(x_bte + h, context.at(OUTPUT).key, context.rows, self.dropout_rate)
        return sharding.constrain(out, RESIDUAL), cache


# The block has the same matrix products as Llama's block, so `forward_flops_per_token` counts its FLOPs, too.
FAMILY = Family(
    lambda config: [Stack("layers", (ParallelBlock,), config.base_num_decoder_layers)], forward_flops_per_token
)

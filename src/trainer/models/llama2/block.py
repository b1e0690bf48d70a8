"""Llama's block (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288). Most other families build on it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.config import Config
from trainer.config.tiles import tiles_of
from trainer.layers.attention import Attention
from trainer.layers.cache import Cache
from trainer.layers.dense import RESIDUAL
from trainer.layers.mlp import MLP
from trainer.layers.norm import RMSNorm
from trainer.layers.sown import Activation, Total, sow
from trainer.ops.dropout import dropout
from trainer.ops.rope import Rope
from trainer.products import Context

# Dropout sites of a block.
ATTENTION, HIDDEN, OUTPUT = range(3)


def make_rope(config: Config) -> Rope:
    """Returns the RoPE of a resolved configuration."""
    return Rope(
        min_timescale=config.rope_min_timescale,
        max_timescale=config.rope_max_timescale,
        kind=config.rope_type,
        linear_scaling_factor=config.rope_linear_scaling_factor,
        factor=config.rope_factor,
        original_length=config.original_max_position_embeddings,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        truncate=config.rope_truncate,
        attention_scaling=config.rope_attention_scaling,
        interleave=config.rope_interleave,
    )


class Block(nnx.Module):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)), then dropout."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        width, epsilon = config.base_emb_dim, config.normalization_layer_epsilon
        self.dropout_rate = config.dropout_rate if config.enable_dropout else 0.0

        self.pre_self_attention_layer_norm = RMSNorm(width, epsilon=epsilon, **dtypes)
        self.self_attention = self.make_attention(config, rngs, dtypes)
        self.post_self_attention_layer_norm = RMSNorm(width, epsilon=epsilon, **dtypes)
        self.add_feed_forward(config, rngs, dtypes)

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any]) -> Any:
        """Makes the attention layer."""
        return Attention(
            config.base_emb_dim,
            heads=config.base_num_query_heads,
            kv_heads=config.base_num_kv_heads,
            head_dim=config.head_dim,
            rope=make_rope(config),
            op=config.attention,
            window=config.sliding_window_size if config.attention_type == "local_sliding" else 0,
            soft_cap=config.attn_logits_soft_cap,
            tiles=tiles_of(config),
            qk_norm_epsilon=config.normalization_layer_epsilon if config.use_qk_norm else None,
            dropout_rate=config.attention_dropout_rate if config.enable_dropout else 0.0,
            rngs=rngs,
            **dtypes,
        )

    def add_feed_forward(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any]) -> None:
        """Makes the feed-forward layer as an attribute with the name of its parameters."""
        self.mlp = MLP(
            config.base_emb_dim,
            config.base_mlp_dim,
            config.mlp_activations,
            dropout_rate=self.dropout_rate,
            rngs=rngs,
            **dtypes,
        )

    def attention_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the normalized residual stream: [b, t, e] -> [b, t, e]."""
        return self.pre_self_attention_layer_norm(x_bte)

    def feed_forward_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the normalized residual stream: [b, t, e] -> [b, t, e]."""
        return self.post_self_attention_layer_norm(x_bte)

    def feed_forward(self, x_bte: jax.Array, context: Context) -> jax.Array:
        """Runs the feed-forward layer: [b, t, e] -> [b, t, e]."""
        return self.mlp(x_bte, context.at(HIDDEN))

    def init_cache(self, rows: int, length: int) -> Any:
        """Returns an empty cache; see `layers.attention.Attention.init_cache`."""
        return self.self_attention.init_cache(rows, length)

    def cache_axes(self) -> Any:
        """The logical axes of its arrays."""
        return self.self_attention.cache_axes()

    def __call__(self, x_bte: jax.Array, cache: Cache | None, context: Context) -> tuple[jax.Array, Cache | None]:
        """Runs one layer: [b, t, e] -> [b, t, e]. Also returns the cache with keys and values added; see
        `layers.attention`."""
        h, cache = self.self_attention(self.attention_input(x_bte), cache, context.at(ATTENTION))
        sow(self, Activation, "attention_output", h)
        x = sharding.constrain(x_bte + h, RESIDUAL)
        h = self.feed_forward(self.feed_forward_input(x), context)
        sow(self, Activation, "mlp_output", h)
        x = sharding.constrain(dropout(x + h, context.at(OUTPUT).key, context.rows, self.dropout_rate), RESIDUAL)
        self._sow_statistics(x, context.segments)
        return x, cache

    def _sow_statistics(self, x_bte: jax.Array, segment_bt: jax.Array) -> None:
        real = (segment_bt != 0)[..., None]
        x = jnp.where(real, x_bte.astype(jnp.float32), 0)
        sow(self, Total, "output_sum", x.sum())
        sow(self, Total, "output_square_sum", (x * x).sum())
        sow(self, Total, "output_zeros", (real & (x_bte == 0)).sum(dtype=jnp.float32))
        sow(self, Total, "output_count", real.sum(dtype=jnp.float32) * x.shape[-1])

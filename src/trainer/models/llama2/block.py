"""Llama's block (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288). Most other families build on it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.config.capabilities.context_keys import token_order
from trainer.config.capabilities.splash_tiles import tiles_of
from trainer.config.keys import Config
from trainer.layers.across import Across
from trainer.layers.attention import Attention
from trainer.layers.cache import Cache
from trainer.layers.dense import RESIDUAL
from trainer.layers.mlp import MLP
from trainer.layers.norm import RMSNorm
from trainer.layers.sown import Activation, Total, sow
from trainer.ops.dropout import dropout
from trainer.ops.multiplied import multiplied
from trainer.ops.rope import Rope
from trainer.products.context import Context

# The indices of a block's dropout sites.
ATTENTION, HIDDEN, OUTPUT = range(3)


def make_rope(config: Config, window: int = 0) -> Rope:
    """Returns the RoPE of layers with the given `window` (0: none), for a resolved configuration."""
    if window and config.local_rope_max_timescale > 0:
        longest = config.local_rope_max_timescale
        interleave, rounded, share = config.rope_interleave, config.batch_invariant, config.partial_rotary_factor
        return Rope(config.rope_min_timescale, longest, share=share, interleave=interleave, rounded=rounded)
    short, long = config.rope_short_factor, config.rope_long_factor
    is_long = config.max_target_length > config.original_max_position_embeddings
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
        factors=tuple(long if is_long else short),
        share=config.partial_rotary_factor,
        interleave=config.rope_interleave,
        rounded=config.batch_invariant,
    )


def across(config: Config) -> Across:
    """Returns how attention is computed if each row's tokens are sharded over devices; `config` is resolved."""
    order = token_order(config)
    return Across(config.context_parallel_strategy, order[0] if order else "")


class Block(nnx.Module):
    """Computes y = x + attention(norm(x)) and returns dropout(y + mlp(norm(y))).

    A family overrides the methods in which its block differs.
    """

    # The attribute that contains the attention layer. The names of the layer's parameters begin with it.
    ATTENTION: ClassVar[str] = "self_attention"
    ATTENTION_CLASS: ClassVar[type[Attention]] = Attention
    # Whether the feed-forward layer reads the block's input, not the residual stream after attention.
    PARALLEL: ClassVar[bool] = False

    def __init__(self, config: Config, rngs: nnx.Rngs, window: int | None = None):
        """`window`: the size of this layer's window, if it depends on the layer; 0: no window. None: the window is the
        same in all layers, and the key attention_type determines whether there is one."""
        dtypes: dict[str, Any] = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        self.dropout_rate = config.dropout_rate if config.enable_dropout else 0.0
        self.residual_multiplier = config.residual_multiplier
        norm = functools.partial(self.make_norm, config.base_emb_dim, config.normalization_layer_epsilon, dtypes)
        self.add_norms(config, norm)
        given = {} if window is None else {"window": window, "rope": make_rope(config, window)}
        setattr(self, self.ATTENTION, self.make_attention(config, rngs, dtypes, **given))
        self.add_feed_forward(config, rngs, dtypes)

    @staticmethod
    def make_norm(width: int, epsilon: float, dtypes: Mapping[str, Any]) -> Any:
        """Makes a norm of the residual stream."""
        return RMSNorm(width, epsilon=epsilon, **dtypes)

    def add_norms(self, config: Config, norm: Callable[[], Any]) -> None:
        """Makes the norms of the residual stream with `norm()` and sets them as attributes. A parameter's name begins
        with its norm's attribute name."""
        del config
        self.pre_self_attention_layer_norm, self.post_self_attention_layer_norm = norm(), norm()

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        """Makes the attention layer. `given`: arguments of `Attention` that override those from `config`."""
        window = config.sliding_window_size if config.attention_type == "local_sliding" else 0
        settings: dict[str, Any] = {
            "heads": config.base_num_query_heads,
            "kv_heads": config.base_num_kv_heads,
            "head_dim": config.head_dim,
            "rope": make_rope(config, window),
            "op": config.attention,
            "window": window,
            "soft_cap": config.attn_logits_soft_cap,
            "scale": config.query_pre_attn_scalar**-0.5 if config.query_pre_attn_scalar else None,
            "tiles": tiles_of(config),
            "across": across(config),
            "qk_norm_epsilon": config.normalization_layer_epsilon if config.use_qk_norm else None,
            "dropout_rate": config.attention_dropout_rate if config.enable_dropout else 0.0,
            "rngs": rngs,
        }
        return self.ATTENTION_CLASS(config.base_emb_dim, **{**settings, **dtypes, **given})

    def add_feed_forward(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any]) -> None:
        """Makes the feed-forward layer and sets it as an attribute. The names of the layer's parameters begin with the
        name of this attribute."""
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

    def attention_output(self, h_bte: jax.Array) -> jax.Array:
        """Maps the attention layer's output to the summand for the residual stream: [b, t, e] -> [b, t, e]."""
        return h_bte

    def feed_forward_input(self, x_bte: jax.Array) -> jax.Array:
        """Returns the normalized residual stream: [b, t, e] -> [b, t, e]."""
        return self.post_self_attention_layer_norm(x_bte)

    def feed_forward(self, x_bte: jax.Array, context: Context) -> jax.Array:
        """Runs the feed-forward layer: [b, t, e] -> [b, t, e]."""
        return self.mlp(x_bte, context.at(HIDDEN))

    def feed_forward_output(self, h_bte: jax.Array) -> jax.Array:
        """Maps the feed-forward layer's output to the summand for the residual stream: [b, t, e] -> [b, t, e]."""
        return h_bte

    def init_cache(self, rows: int, length: int) -> Any:
        """Returns an empty cache; see `layers.attention.Attention.init_cache`."""
        return getattr(self, self.ATTENTION).init_cache(rows, length)

    def cache_axes(self) -> Any:
        """Returns the logical axes of the arrays of `init_cache`."""
        return getattr(self, self.ATTENTION).cache_axes()

    @property
    def packs_rows(self) -> bool:
        return getattr(getattr(self, self.ATTENTION), "packs_rows", False)

    def __call__(self, x_bte: jax.Array, cache: Cache | None, context: Context) -> tuple[jax.Array, Cache | None]:
        """Runs one layer: [b, t, e] -> [b, t, e]. Also returns the cache with keys and values added; see
        `layers.attention`."""
        attention = getattr(self, self.ATTENTION)
        h, cache = attention(self.attention_input(x_bte), cache, context.at(ATTENTION))
        h = multiplied(self.attention_output(h), self.residual_multiplier)
        sow(self, Activation, "attention_output", h)
        x = sharding.constrain(x_bte + h, RESIDUAL)
        h = self.feed_forward_input(x_bte if self.PARALLEL else x)
        h = self.feed_forward_output(self.feed_forward(h, context))
        h = multiplied(h, self.residual_multiplier)
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


class OuterNorms(Block):
    """A mixin for blocks. It normalizes the outputs of attention (with `use_post_attn_norm`) and of the MLP (with
    `use_post_ffw_norm`) before they are added to the residual stream."""

    def add_norms(self, config: Config, norm: Callable[[], Any]) -> None:
        super().add_norms(config, norm)
        self.post_self_attention_norm = norm() if config.use_post_attn_norm else None
        self.post_ffw_norm = norm() if config.use_post_ffw_norm else None

    def attention_output(self, h_bte: jax.Array) -> jax.Array:
        return h_bte if self.post_self_attention_norm is None else self.post_self_attention_norm(h_bte)

    def feed_forward_output(self, h_bte: jax.Array) -> jax.Array:
        return h_bte if self.post_ffw_norm is None else self.post_ffw_norm(h_bte)

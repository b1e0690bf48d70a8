"""A custom block written directly in Linen, and the NNX block that replaces it.

An example for docs/guides/migrating.md. Select either block by import path:

    python -m trainer.train base.yml decoder_block=docs.guides.team_block:NNXBlock
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

INIT = jax.nn.initializers.lecun_normal()
# Logical axes of a kernel that reads from (UP) or writes to (DOWN) the residual stream.
UP, DOWN = ("embed", "mlp"), ("mlp", "embed")


def attend(q_bthd: jax.Array, k_bthd: jax.Array, v_bthd: jax.Array, segment_bt: jax.Array) -> jax.Array:
    """Returns causal attention within documents, [b, t, heads, d]. segment_bt: each token's document, 0: padding."""
    length = segment_bt.shape[1]
    seen = jnp.tril(jnp.ones((length, length), bool)) & (segment_bt[:, :, None] == segment_bt[:, None, :])
    scores = jnp.einsum("bthd,bshd->bhts", q_bthd, k_bthd) * q_bthd.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v_bthd)


def linen_dense(features: int, names: tuple[str, str], name: str) -> linen.Dense:
    """Returns a dense layer with a kernel that is sharded by the logical axes `names`."""
    return linen.Dense(features, kernel_init=linen.with_logical_partitioning(INIT, names), name=name)


class LinenBlock(linen.Module):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)), with biases, as in GPT-2."""

    config: Any

    @linen.compact
    def __call__(self, x, cache, context):
        """Returns x after the layer, [b, t, e], and `cache` unchanged. `context` is a `products.context.Context`."""
        heads, head_dim = self.config.base_num_query_heads, self.config.head_dim
        h = linen.LayerNorm(name="ln_1")(x)
        q, k, v = jnp.split(linen_dense(3 * heads * head_dim, UP, "c_attn")(h), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], heads, head_dim) for a in (q, k, v))
        h = attend(q, k, v, context.segments).reshape(*x.shape[:2], heads * head_dim)
        x = x + linen_dense(x.shape[-1], DOWN, "c_proj")(h)
        h = linen_dense(self.config.base_mlp_dim, UP, "fc_in")(linen.LayerNorm(name="ln_2")(x))
        return x + linen_dense(x.shape[-1], DOWN, "fc_out")(linen.gelu(h)), cache


def nnx_linear(inputs: int, features: int, names: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    """The NNX version of `linen_dense`."""
    return nnx.Linear(inputs, features, kernel_init=nnx.with_partitioning(INIT, names), rngs=rngs)


class NNXBlock(nnx.Module):
    """`LinenBlock` in NNX, with more descriptive names of parameters."""

    # Maps each name in this block to the name in LinenBlock.
    PARAMETER_NAMES = {
        "attention_norm": "ln_1",
        "qkv": "c_attn",
        "attention_out": "c_proj",
        "mlp_norm": "ln_2",
        "mlp_in": "fc_in",
        "mlp_out": "fc_out",
    }

    def __init__(self, config, rngs: nnx.Rngs):
        width, self.heads, self.head_dim = config.base_emb_dim, config.base_num_query_heads, config.head_dim
        attention = self.heads * self.head_dim
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx_linear(width, 3 * attention, UP, rngs)
        self.attention_out = nnx_linear(attention, width, DOWN, rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = nnx_linear(width, config.base_mlp_dim, UP, rngs)
        self.mlp_out = nnx_linear(config.base_mlp_dim, width, DOWN, rngs)

    def __call__(self, x, cache, context):
        """See `LinenBlock`."""
        x = self.attend(x, context.segments)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x)))), cache

    def attend(self, x, segments):
        """Returns x + attention(norm(x))."""
        q, k, v = jnp.split(self.qkv(self.attention_norm(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], self.heads, self.head_dim) for a in (q, k, v))
        h = attend(q, k, v, segments).reshape(*x.shape[:2], self.heads * self.head_dim)
        return x + self.attention_out(h)


class NNXBlockWithABug(NNXBlock):
    """A translation with one bug: it computes exact GELU, but `linen.gelu` is the tanh approximation."""

    def __call__(self, x, cache, context):
        """See `LinenBlock`."""
        x = self.attend(x, context.segments)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x)), approximate=False)), cache

"""A block as a team may have it, written by hand in Linen, and the NNX block that is to take its place.

The example of docs/guides/migrating.md. Both are taken by import path:

    python -m trainer.train base.yml decoder_block=docs.guides.team_block:NNXBlock
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx


def attend(q_bthd: jax.Array, k_bthd: jax.Array, v_bthd: jax.Array, segment_bt: jax.Array) -> jax.Array:
    """Causal attention within documents, [b, t, heads, d]; segment 0 is padding."""
    length = segment_bt.shape[1]
    seen = jnp.tril(jnp.ones((length, length), bool)) & (segment_bt[:, :, None] == segment_bt[:, None, :])
    scores = jnp.einsum("bthd,bshd->bhts", q_bthd, k_bthd) * q_bthd.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v_bthd)


class LinenBlock(linen.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with biases, as in GPT-2."""

    config: Any

    @linen.compact
    def __call__(self, x, cache, position, segment, row, key):
        """One layer: [b, t, e] -> [b, t, e]; position, segment int [b, t], row int [b], key for dropout or None."""
        heads, head_dim = self.config.base_num_query_heads, self.config.head_dim
        h = linen.LayerNorm(name="ln_1")(x)
        q, k, v = jnp.split(linen.Dense(3 * heads * head_dim, name="c_attn")(h), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], heads, head_dim) for a in (q, k, v))
        h = attend(q, k, v, segment).reshape(*x.shape[:2], heads * head_dim)
        x = x + linen.Dense(x.shape[-1], name="c_proj")(h)
        h = linen.Dense(self.config.base_mlp_dim, name="fc_in")(linen.LayerNorm(name="ln_2")(x))
        return x + linen.Dense(x.shape[-1], name="fc_out")(linen.gelu(h)), cache


class NNXBlock(nnx.Module):
    """The same block in NNX, with better names."""

    # From names in this block to names in the block that it replaces.
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
        self.qkv = nnx.Linear(width, 3 * attention, rngs=rngs)
        self.attention_out = nnx.Linear(attention, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = nnx.Linear(width, config.base_mlp_dim, rngs=rngs)
        self.mlp_out = nnx.Linear(config.base_mlp_dim, width, rngs=rngs)

    def __call__(self, x, cache, position, segment, row, key):
        """See `LinenBlock`."""
        x = self.attend(x, segment)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x)))), cache

    def attend(self, x, segment):
        """x + attention(norm(x))."""
        q, k, v = jnp.split(self.qkv(self.attention_norm(x)), 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], self.heads, self.head_dim) for a in (q, k, v))
        h = attend(q, k, v, segment).reshape(*x.shape[:2], self.heads * self.head_dim)
        return x + self.attention_out(h)


class NNXBlockWithABug(NNXBlock):
    """A translation that went wrong in one place: GELU is exact, where Linen's is the approximation by tanh."""

    def __call__(self, x, cache, position, segment, row, key):
        """See `LinenBlock`."""
        x = self.attend(x, segment)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x)), approximate=False)), cache

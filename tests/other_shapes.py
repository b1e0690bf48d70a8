"""A family whose block differs from Llama's: its own scales, gate and rotation, biases in some layers, sinks, and a
running mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.layers.attention import Attention
from trainer.layers.dense import INPUT, Dense
from trainer.layers.mlp import MLP
from trainer.layers.norm import RMSNorm
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.llama2.block import make_rope
from trainer.ops.rope import Rope, rope

SCALE, EMBEDDING_SCALE, LIMIT = 0.4, 3.0, 0.5
ATTENTION, HIDDEN = range(2)


def clipped_gate(gate, up):
    """Hidden units that are not simply a product of activations of the two projections."""
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(1.7 * gate) * (up + 1)


class Faster(NamedTuple):
    """A rotation that no `Rope` describes: positions are multiplied by three."""

    how: Rope

    def __call__(self, x_bthd, position_bt):
        return rope(x_bthd, 3 * position_bt, self.how)


class Block(nnx.Module):
    """x + attention(norm(x)) + mix(mean of norm(x) over the positions so far), then x + mlp(x)."""

    logit_factors = None

    def __init__(self, config, rngs):
        dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        self.width = config.base_emb_dim
        self.norm = RMSNorm(self.width, epsilon=config.normalization_layer_epsilon, **dtypes)
        self.self_attention = Attention(
            self.width,
            heads=config.base_num_query_heads,
            kv_heads=config.base_num_kv_heads,
            head_dim=config.head_dim,
            rope=Faster(make_rope(config)),
            op=config.attention,
            scale=SCALE,
            sinks=True,
            bias=("query", "key", "value"),
            rngs=rngs,
            **dtypes,
        )
        self.mix = Dense([self.width], [self.width], ("embed", None), rngs=rngs, **dtypes)
        two = ("linear", "linear")
        mlp = {"dropout_rate": 0.0, "bias": ("wo",), "combine": clipped_gate, "rngs": rngs, **dtypes}
        self.mlp = MLP(self.width, config.base_mlp_dim, two, **mlp)

    def init_cache(self, rows, length):
        return {"attention": self.self_attention.init_cache(rows, length), "sum": jnp.zeros((rows, self.width))}

    def __call__(self, x, cache, context):
        h = self.norm(x)
        real = (context.segments != 0)[..., None]
        total = jnp.cumsum(jnp.where(real, h, 0), axis=1)
        attention = None
        if cache is None:  # subtract the preceding segments
            first = jnp.arange(x.shape[1]) - context.positions
            padded = jnp.pad(total, ((0, 0), (1, 0), (0, 0)))
            total = total - jnp.take_along_axis(padded, first[..., None], axis=1)
        else:
            total = total + cache.read()["sum"][:, None].astype(x.dtype)
            attention = cache.part("attention")
        mean = total / (context.positions + 1)[..., None].astype(x.dtype)
        attended, attention = self.self_attention(h, attention, context.at(ATTENTION))
        if cache is not None:
            # Padding is at the end and adds nothing, so the last entry is the sum at the last token.
            cache = cache.with_part("attention", attention)
            cache = cache.with_part("sum", cache.part("sum").replace(total[:, -1]))
        x = x + attended + self.mix(mean, INPUT)
        return x + self.mlp(x, context.at(HIDDEN)), cache


FAMILY = Family(
    lambda config: [Stack("layers", (Block,), config.base_num_decoder_layers)],
    embedding_scale=lambda config: EMBEDDING_SCALE,
)

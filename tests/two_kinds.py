"""A family with two kinds of blocks in two stacks, as a user can write it without changing the trainer."""

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer.layers.dense import INPUT, Dense
from trainer.layers.param import Buffer
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.llama2 import block as llama2
from trainer.ops.dropout import dropout


class Shift(nnx.Module):
    """Computes x + a product of the previous token + a fixed bias. The cache is the last token."""

    PARAMETER_NAMES = {"mix": "shift"}
    logit_factors = None  # it has no attention

    def __init__(self, config, rngs):
        dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        self.width, self.rate = config.base_emb_dim, config.dropout_rate
        self.mix = Dense([self.width], [self.width], ("embed", "shifted"), rngs=rngs, **dtypes)
        self.bias = Buffer(jnp.full(self.width, 0.1, config.weight_dtype))

    def init_cache(self, rows, length):
        return jnp.zeros((rows, self.width))

    def __call__(self, x, cache, context):
        first = jnp.zeros_like(x[:, 0]) if cache is None else cache.read().astype(x.dtype)
        before = jnp.concatenate([first[:, None], x[:, :-1]], axis=1)
        before = jnp.where(context.positions[..., None] > 0, before, 0)
        if cache is not None:
            last = (context.segments != 0).sum(axis=1) - 1
            cache = cache.replace(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])
        shifted = checkpoint_name(self.mix(before, INPUT), "shifted")
        return x + dropout(shifted, context.key, context.rows, self.rate) + self.bias[...], cache


def stacks(config):
    """Returns a stack of one shift, then a stack of (layers - 1) / 2 pairs of a Llama block and a shift."""
    pairs = (config.base_num_decoder_layers - 1) // 2
    return [Stack("shift_layers", (Shift,), 1), Stack("layers", (llama2.Block, Shift), pairs)]


family = Family(stacks, lambda config, keys: 1000.0, projections=("shifted",), axes={"shifted": ("tensor",)})

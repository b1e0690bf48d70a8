"""A block works by itself, without a mesh, a backend or NNX settings."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from support import tiny_config

from trainer.models.llama2.block import Block
from trainer.products import Context


def test_a_block_works_in_a_notebook():
    config = tiny_config("nnx")
    block = Block(config, nnx.Rngs(0))
    x, index = jnp.ones((2, 4, config.base_emb_dim)), jnp.tile(jnp.arange(4), (2, 1))
    out, cache = block(x, None, Context(index, jnp.ones_like(index), jnp.arange(2), None))
    assert out.shape == x.shape
    assert np.isfinite(out).all()
    assert cache is None

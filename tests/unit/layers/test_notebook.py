"""A block works by itself: it needs no mesh, backend or NNX settings."""

import jax
import numpy as np
from flax import nnx
from support import tiny_config

from trainer.models.llama2.block import Block
from trainer.products.context import Context


def test_a_block_works_in_a_notebook():
    config = tiny_config("nnx")
    x, index = np.ones((2, 4, config.base_emb_dim), np.float32), np.tile(np.arange(4), (2, 1))

    @jax.jit
    def run(x, index):
        return Block(config, nnx.Rngs(0))(x, None, Context(index, index + 1, index[:, 0], None))

    out, cache = run(x, index)
    assert out.shape == x.shape
    assert np.isfinite(out).all()
    assert cache is None

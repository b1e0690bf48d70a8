"""Norms outside of the blocks."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from trainer.config.keys import Config
from trainer.models.families import family


def make_norm(config: Config, rngs: nnx.Rngs | None = None) -> Any:
    """Returns a norm of the family's type for the residual stream: the norm after the last block, or one in a module of
    multi-token prediction. `rngs` is unused."""
    del rngs
    return family(config.decoder_block).norm(
        config.base_emb_dim,
        epsilon=config.normalization_layer_epsilon,
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
    )

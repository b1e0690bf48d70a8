"""Adds updates to parameters, optionally with stochastic rounding to bfloat16."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainer.config.keys import Config
from trainer.ops.paths import name_of
from trainer.ops.random import ROUNDING, seed_key


def applied(config: Config, params: Any, updates: Any, step: jax.Array) -> Any:
    """Returns `params` + `updates` in the dtypes of `params`, rounded to nearest.

    With `weight_stochastic_rounding`, a bfloat16 parameter is rounded up or down at random, with the sum as the
    expected value (Gupta et al. 2015, arXiv:1502.02551). The random numbers depend on the seed, the step and the
    parameter's name. An update of 0 changes nothing.
    """
    if not config.weight_stochastic_rounding:
        return optax.apply_updates(params, updates)
    key = jax.random.fold_in(seed_key(config.init_weights_seed, ROUNDING), step)

    def one(path: Any, param: jax.Array, update: jax.Array) -> jax.Array:
        if param.dtype != jnp.bfloat16:
            return (param + update).astype(param.dtype)
        total = param.astype(jnp.float32) + update
        own = jax.random.fold_in(key, jnp.uint32(zlib.crc32(name_of(path).encode())))
        # The upper 16 bits of a float32 are the number rounded towards zero to bfloat16. Noise that is added to the
        # lower 16 bits may carry into the upper bits.
        noise = jax.random.bits(own, param.shape, jnp.uint16).astype(jnp.uint32)
        upper = (jax.lax.bitcast_convert_type(total, jnp.uint32) + noise) >> 16
        rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
        return jnp.where(jnp.isfinite(total), rounded, total.astype(jnp.bfloat16))

    return jax.tree_util.tree_map_with_path(one, params, updates)

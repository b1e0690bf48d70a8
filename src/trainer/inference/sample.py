"""Sampling one token at a time, with the caches of the blocks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.backends import Model
from trainer.backends.base import tree_mode
from trainer.models.families import init_cache
from trainer.ops.random import SAMPLING, seed_key


def sample(
    config, model: Model, params: Any, rest: Any, prompt: Sequence[int], *, rows: int, temperature: float, seed: int
) -> jax.Array:
    """Continue `prompt` to `config.max_target_length` tokens, `rows` times: int32 [rows, length], prompt included.

    Every token is drawn from softmax(logits / temperature); temperature 0 takes the most likely token. One pass over
    the prompt fills the cache, with the attention op of training; a loop then draws token by token.

    Raises:
      ValueError: the prompt is empty or fills the whole length.
    """
    length, given = config.max_target_length, len(prompt)
    if not 0 < given < length:
        raise ValueError(f"a prompt of {given} tokens leaves no room in a row of {length}")
    row = jnp.arange(rows)

    def draw(hidden: jax.Array, position: jax.Array | int) -> jax.Array:
        """The tokens [rows] after `position`, from its hidden states [rows, 1, e]."""
        logits = model.apply(params, rest, hidden, method="head")[0][:, 0].astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(logits, axis=-1)
        key = jax.random.fold_in(seed_key(seed, SAMPLING), position)
        return jax.random.categorical(key, logits / temperature, axis=-1)

    def advance(carry: tuple[jax.Array, Any], position: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        token, cache = carry
        tokens, positions = token[:, None], jnp.full((rows, 1), position)
        hidden, _, cache = model.apply(params, rest, tokens, positions, jnp.ones_like(tokens), row, cache=cache)
        return (draw(hidden, position), cache), token

    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    tokens = jnp.zeros_like(positions).at[:, :given].set(jnp.asarray(prompt))
    segments = jnp.where(positions < given, 1, 0)
    with tree_mode():
        cache = init_cache(config, rows, length)
    hidden, _, cache = model.apply(params, rest, tokens, positions, segments, row, cache=cache)
    first = draw(hidden[:, given - 1 : given], given - 1)
    drawn = jax.lax.scan(advance, (first, cache), jnp.arange(given, length))[1]
    return jnp.concatenate([tokens[:, :given], drawn.T], axis=1)

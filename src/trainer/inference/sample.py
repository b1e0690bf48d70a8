"""Text from a model, one token at a time through the key-value cache."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.backends import Model
from trainer.models.transformer import init_cache
from trainer.ops.random import SAMPLING, seed_key


def sample(
    config, model: Model, params: Any, rest: Any, prompt: Sequence[int], *, rows: int, temperature: float, seed: int
) -> jax.Array:
    """Continue `prompt` to `config.max_target_length` tokens, `rows` times: int32 [rows, length], prompt included.

    Every token is drawn from softmax(logits / temperature); temperature 0 takes the likeliest. One compiled loop serves
    prompt and continuation: while the prompt lasts, its next token replaces what was drawn.

    Raises:
      ValueError: the prompt is empty or fills the whole length.
    """
    length = config.max_target_length
    if not 0 < len(prompt) < length:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a row of {length}")
    given = jnp.full(length, -1).at[: len(prompt)].set(jnp.asarray(prompt))
    row = jnp.arange(rows)

    def advance(carry: tuple[jax.Array, Any], position: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        drawn, cache = carry
        token = jnp.where(given[position] >= 0, given[position], drawn)
        tokens, positions = token[:, None], jnp.full((rows, 1), position)
        hidden, _, cache = model.apply(params, rest, tokens, positions, jnp.ones_like(tokens), row, cache=cache)
        logits = model.apply(params, rest, hidden, method="head")[0][:, 0].astype(jnp.float32)
        if temperature == 0:
            drawn = jnp.argmax(logits, axis=-1)
        else:
            key = jax.random.fold_in(seed_key(seed, SAMPLING), position)
            drawn = jax.random.categorical(key, logits / temperature, axis=-1)
        return (drawn, cache), token

    start = (jnp.zeros(rows, jnp.int32), init_cache(config, rows, length))
    return jax.lax.scan(advance, start, jnp.arange(length))[1].T

"""Drawing the next token from logits, with settings and a random key for each row of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config import Config, UserError
from trainer.config.schema import INT32_MAX
from trainer.ops.random import SAMPLING, seed_key

UINT32_MAX = 2**32 - 1


class Sampling(NamedTuple):
    """How rows draw tokens: scalars, or arrays [b] with the settings of each row.

    First, only the `top_k` most likely tokens are kept. Then only the nucleus is kept: the smallest set of most likely
    tokens with a total probability of at least `nucleus_p` (Holtzman et al. 2020, arXiv:1904.09751). Both use
    temperature 1. The token is drawn from softmax(logits / temperature) over the remaining tokens.
    """

    temperature: jax.Array | float = 1.0  # 0: the most likely token
    top_k: jax.Array | int = 0  # 0: all tokens
    nucleus_p: jax.Array | float = 1.0  # 1: all tokens


class Draw(NamedTuple):
    """A token for each row, int32 [b], and the logarithm of its probability at temperature 1, float32 [b]."""

    token: jax.Array
    log_prob: jax.Array


def sampling_of(config: Config) -> Sampling:
    """Returns the settings of the keys decode_sampling_*, checked by `config.decoding_keys`."""
    strategy = config.decode_sampling_strategy
    return Sampling(
        temperature=0.0 if strategy == "greedy" else config.decode_sampling_temperature,
        top_k=config.decode_sampling_top_k if strategy in ("topk", "composite") else 0,
        nucleus_p=config.decode_sampling_nucleus_p if strategy in ("nucleus", "composite") else 1.0,
    )


def check_drawing(sampling: Sampling, seeds: Sequence[int] = ()) -> None:
    """Checks settings of one or of several sequences, and their seeds.

    Raises:
      UserError: names each value that is not allowed.
    """
    temperature, nucleus_p = (np.asarray(setting, np.float32) for setting in (sampling.temperature, sampling.nucleus_p))
    top_k, seed = np.asarray(sampling.top_k), np.asarray(seeds)
    checks = {
        "temperature": (temperature, np.isfinite(temperature) & (temperature >= 0), "0 (greedy) or a positive number"),
        "top_k": (top_k, _integers(top_k, INT32_MAX), "0 (all tokens) or a positive integer"),
        "nucleus_p": (nucleus_p, (nucleus_p > 0) & (nucleus_p <= 1), "a number in (0, 1]; 1: all tokens"),
        "seed": (seed, _integers(seed, UINT32_MAX), f"an integer in [0, {UINT32_MAX}]"),
    }
    wrong = [
        f"{name}={np.extract(~good, values)[0]}: allowed: {text}"
        for name, (values, good, text) in checks.items()
        if not good.all()
    ]
    if wrong:
        raise UserError("\n  ".join(["tokens cannot be drawn:", *wrong]))


def _integers(values: np.ndarray, most: int) -> np.ndarray:
    """Returns which `values` are integers in [0, most]."""
    good = np.full(values.shape, not values.size or values.dtype.kind in "iu")
    return good & (values >= 0) & (values <= most)


def sampling_key(seed: int, sample: int = 0) -> jax.Array:
    """Returns the key of a request with `seed`, or of one of its samples.

    The token at a position is drawn with this key folded with the position, so it does not depend on other rows.
    """
    return jax.random.fold_in(seed_key(seed, SAMPLING), sample)


def wrapped(data: jax.Array) -> jax.Array:
    """Returns the keys [b] for key data, uint32 [b, 2]."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def draw(logits_bv: jax.Array, sampling: Sampling, keys_b: jax.Array, position_b: jax.Array) -> Draw:
    """Draws the token at `position_b` of each row.

    Args:
      logits_bv: [b, v].
      sampling: arrays [b].
      keys_b: one key per row, see `sampling_key`.
    """
    logits = logits_bv.astype(jnp.float32)
    top_k, nucleus_p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.nucleus_p)
    chosen = jax.lax.cond(
        ((top_k > 0) | (nucleus_p < 1)).any(),
        lambda: jnp.where(_kept(logits, top_k, nucleus_p), logits, -jnp.inf),
        lambda: logits,
    )
    temperature = jnp.asarray(sampling.temperature)
    keys = jax.vmap(jax.random.fold_in)(keys_b, position_b)
    # The same division for every row; greedy rows ignore it.
    scaled = chosen / jnp.where(temperature > 0, temperature, 1)[:, None]
    drawn = jax.vmap(jax.random.categorical)(keys, scaled)
    return jnp.where(temperature > 0, drawn, logits.argmax(axis=-1)).astype(jnp.int32)


def _kept(logits_bv: jax.Array, top_k_b: jax.Array, nucleus_p_b: jax.Array) -> jax.Array:
    """Returns whether a token is in both the top k and the nucleus: bool [b, v]. Of equally likely tokens, the first
    come first."""
    order = jnp.argsort(logits_bv, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits_bv, order, axis=-1)
    rank = jnp.arange(logits_bv.shape[-1])
    within = (top_k_b[:, None] == 0) | (rank < top_k_b[:, None])
    # The nucleus is computed within the top k, whose probabilities add up to 1.
    probability = jax.nn.softmax(jnp.where(within, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    within &= (nucleus_p_b[:, None] >= 1) | (before < nucleus_p_b[:, None])
    rows = jnp.arange(len(logits_bv))[:, None]
    return jnp.zeros_like(within).at[rows, order].set(within)

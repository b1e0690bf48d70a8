"""Draws the next token from logits, with settings and a random key for each row of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.schema import INT32_MAX
from trainer.ops.random import SAMPLING, gumbel_at, seed_key

UINT32_MAX = 2**32 - 1
# With top_k or nucleus_p, `draw` first considers only this many of a row's most likely tokens, the candidates. It
# considers all tokens only if the candidates do not contain the whole top k or nucleus.
CANDIDATES = 256


class Sampling(NamedTuple):
    """The settings for drawing tokens: scalars for all rows, or arrays [b] with one entry per row.

    First, only the `top_k` most likely tokens are kept. Then only the nucleus is kept: the smallest set of most likely
    tokens with a total probability of at least `nucleus_p` (Holtzman et al. 2020, arXiv:1904.09751). Both steps use
    temperature 1. The token is drawn from softmax(logits / temperature) over the remaining tokens.
    """

    temperature: jax.Array | np.ndarray | float = 1.0  # 0: the most likely token
    top_k: jax.Array | np.ndarray | int = 0  # 0: all tokens
    nucleus_p: jax.Array | np.ndarray | float = 1.0  # 1: all tokens


def sampling_of(config: Config) -> Sampling:
    """Returns the settings that the keys decode_sampling_* specify. `capabilities.decoding_keys` checks these keys."""
    strategy = config.decode_sampling_strategy
    return Sampling(
        temperature=0.0 if strategy == "greedy" else config.decode_sampling_temperature,
        top_k=config.decode_sampling_top_k if strategy in ("topk", "composite") else 0,
        nucleus_p=config.decode_sampling_nucleus_p if strategy in ("nucleus", "composite") else 1.0,
    )


def check_drawing(sampling: Sampling, seeds: Sequence[int] = ()) -> None:
    """Checks the settings of one or several sequences, and their seeds. Raises a UserError that names every invalid
    setting, with one of its invalid values."""
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
    """Returns for each of `values` whether it is an integer in [0, `most`]."""
    good = np.full(values.shape, not values.size or values.dtype.kind in "iu")
    return good & (values >= 0) & (values <= most)


def sampling_key(seed: int | jax.Array, sample: int | jax.Array = 0) -> jax.Array:
    """Returns the random key for sample number `sample` of a request with the seed `seed`.

    To draw the token at a position, `draw` folds the position into this key, so the token does not depend on other
    rows.
    """
    return jax.random.fold_in(seed_key(seed, SAMPLING), sample)


def request_keys(requests_b2: jax.Array) -> jax.Array:
    """Returns the key data of `sampling_key` for each (seed, sample) of `requests_b2`: uint32 [b, 2]."""
    return jax.random.key_data(jax.vmap(lambda request: sampling_key(*request))(requests_b2))


def wrapped(data: jax.Array) -> jax.Array:
    """Returns the keys [b] for key data, uint32 [b, 2]."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def draw(logits_bv: jax.Array, sampling: Sampling, keys_b: jax.Array, position_b: jax.Array) -> jax.Array:
    """Draws the token at position `position_b` of each row: of the tokens that `sampling` keeps, the one with the
    largest logit / temperature + Gumbel noise. At temperature 0, returns the most likely token.

    A token's noise depends only on the key, the position and the token, so the result is the same whether all tokens or
    only candidates are considered. The cost depends on the rows' settings: if all rows are greedy, no random number is
    drawn.

    Args:
      logits_bv: [b, v].
      sampling: arrays [b].
      keys_b: one key per row, see `sampling_key`.
    """
    temperature, top_k, nucleus_p = map(jnp.asarray, sampling)
    fold_in = jax.vmap(jax.random.fold_in)
    size = logits_bv.shape[-1]
    top_k = jnp.where(top_k < size, top_k, 0)
    drawn, limited = temperature > 0, (top_k > 0) | (nucleus_p < 1)
    divisor = jnp.where(drawn, temperature, 1)[:, None]  # 1 for greedy rows, whose quotients are not used
    greedy = _first_of_largest(logits_bv, jnp.arange(size))

    # Each branch casts the logits itself, so that the other branches do not need memory for the result.
    def from_candidates(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits_bv.astype(jnp.float32)
        # -0 must be as likely as 0, but jax.lax.top_k ranks 0 above -0, so -0 is replaced by 0.
        ranked, candidates = jax.lax.top_k(jnp.where(logits == 0, 0, logits), min(CANDIDATES, size))
        kept, enough = _kept_of_candidates(ranked, logits, top_k, nucleus_p)
        noise = jax.vmap(gumbel_at)(keys, candidates)
        scores = jnp.where(kept, ranked, -jnp.inf) / divisor + noise
        return _first_of_largest(scores, candidates), drawn & limited & enough

    def from_all(keys: jax.Array, logits: jax.Array) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), mode="low"))(keys)
        return _first_of_largest(logits / divisor + noise, jnp.arange(size))

    def from_all_kept(keys: jax.Array, missing: jax.Array) -> jax.Array:
        logits = logits_bv.astype(jnp.float32)
        kept = _kept(logits, jnp.where(missing, top_k, 0), jnp.where(missing, nucleus_p, 1))
        return jnp.where(missing, from_all(keys, jnp.where(kept, logits, -jnp.inf)), greedy)

    def from_either() -> jax.Array:
        keys = fold_in(keys_b, position_b)
        token, found = from_candidates(keys)
        missing = drawn & ~found
        others = jax.lax.cond(missing.any(), from_all_kept, lambda *_: greedy, keys, missing)
        return jnp.where(found, token, others)

    def without_limits() -> jax.Array:
        return jnp.where(drawn, from_all(fold_in(keys_b, position_b), logits_bv.astype(jnp.float32)), greedy)

    # A GPU waits for the host at each conditional, so one switch selects among all three cases. Only `from_either`
    # contains a second conditional.
    which = jnp.where(drawn.any(), jnp.where((drawn & limited).any(), 2, 1), 0)
    return jax.lax.switch(which, (lambda: greedy, without_limits, from_either))


def _first_of_largest(values_bn: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the smallest id among the tokens with the row's largest value: int32 [b]. `tokens`: the token ids of the
    values, [n] or [b, n]."""
    smaller = values_bn < values_bn.max(axis=-1, keepdims=True)  # all false if the row has NaN
    return jnp.where(smaller, INT32_MAX, tokens).min(axis=-1)


def _kept_of_candidates(
    ranked_bn: jax.Array, logits_bv: jax.Array, top_k_b: jax.Array, nucleus_p_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns which of the n most likely tokens are kept, bool [b, n], and whether no token besides these n is kept:
    bool [b]. `ranked_bn`: the n largest logits of each row of `logits_bv`, in descending order."""
    top_k, nucleus_p = top_k_b[:, None], nucleus_p_b[:, None]
    kept = (top_k == 0) | (jnp.arange(ranked_bn.shape[-1]) < top_k)
    largest = ranked_bn.max(axis=-1, keepdims=True)  # with a slice of ranked_bn, XLA would sort the whole vocabulary
    weight = jnp.where(kept, jnp.exp(ranked_bn - largest), 0)
    # The nucleus is computed within the top k, whose probabilities are normalized to sum to 1.
    total = jnp.where(
        top_k == 0, jnp.exp(logits_bv - largest).sum(axis=-1, keepdims=True), weight.sum(axis=-1, keepdims=True)
    )
    reached = jnp.cumsum(weight / total, axis=-1)
    kept &= (nucleus_p >= 1) | (reached - weight / total < nucleus_p)
    enough = jnp.where(top_k_b == 0, reached[:, -1] >= nucleus_p_b, top_k_b <= ranked_bn.shape[-1])
    return kept, enough


def _kept(logits_bv: jax.Array, top_k_b: jax.Array, nucleus_p_b: jax.Array) -> jax.Array:
    """Returns, for each token, whether it is in both the top k and the nucleus: bool [b, v]."""
    kept = _leading(logits_bv, jnp.ones_like(logits_bv), jnp.where(top_k_b > 0, top_k_b, jnp.inf))
    probability = jax.nn.softmax(jnp.where(kept, logits_bv, -jnp.inf), axis=-1)
    return kept & _leading(logits_bv, probability, jnp.where(nucleus_p_b < 1, nucleus_p_b, jnp.inf))


def _leading(logits_bv: jax.Array, weight_bv: jax.Array, total_b: jax.Array) -> jax.Array:
    """Returns whether each token is in the smallest set of most likely tokens whose weights add up to at least
    `total_b`: bool [b, v]. If `total_b` is infinite, the set has all tokens. Among equally likely tokens, the first
    ones take precedence.

    The smallest logit of the set is found bit by bit, because sorting takes ten times as long.
    """
    bits = jax.lax.bitcast_convert_type(logits_bv, jnp.uint32)
    rank = jnp.where(logits_bv < 0, ~bits, bits | jnp.uint32(2**31))  # integers in the same order as the logits

    def weights_of(tokens: jax.Array) -> jax.Array:
        return jnp.where(tokens, weight_bv, 0)

    def with_bit(i: jax.Array, last_b: jax.Array) -> jax.Array:
        larger = last_b | (jnp.uint32(2**31) >> i.astype(jnp.uint32))
        return jnp.where(weights_of(rank >= larger[:, None]).sum(axis=-1) >= total_b, larger, last_b)

    def search() -> jax.Array:
        last = jax.lax.fori_loop(0, 32, with_bit, jnp.zeros(len(rank), jnp.uint32))[:, None]
        before, equal = weights_of(rank > last).sum(axis=-1, keepdims=True), weights_of(rank == last)
        before_equal = before + jnp.cumsum(equal, axis=-1) - equal
        return (rank > last) | (rank == last) & (before_equal < total_b[:, None])

    return jax.lax.cond(jnp.isfinite(total_b).any(), search, lambda: jnp.ones(rank.shape, bool))

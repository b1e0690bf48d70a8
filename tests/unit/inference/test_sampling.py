"""How tokens are drawn: histograms against the distribution that each strategy defines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config

from trainer.inference.sampling import Sampling, draw, sampling_key, sampling_of

LOGITS = np.array([2.0, 1.0, 0.5, 0.5, -1.0, 1.5, -3.0])
DRAWS = 20_000
KEYS = {
    "greedy": {},
    "weighted": {"decode_sampling_temperature": 1.7},
    "topk": {"decode_sampling_temperature": 0.8, "decode_sampling_top_k": 4},
    "nucleus": {"decode_sampling_temperature": 1.3, "decode_sampling_nucleus_p": 0.7},
    "composite": {"decode_sampling_temperature": 1.0, "decode_sampling_top_k": 3, "decode_sampling_nucleus_p": 0.8},
}
# Tokens by falling probability: 0, 5, 1, then 2 and 3, equally likely; softmax: 0.40, 0.24, 0.15, 0.09, 0.09, ...
KEPT = {"greedy": [0], "weighted": range(7), "topk": [0, 5, 1, 2], "nucleus": [0, 5, 1], "composite": [0, 5, 1]}
# Of the top three, 0 and 5 have 0.81 of the probability.
KEPT["composite"] = [0, 5]


def settings(strategy):
    return sampling_of(tiny_config("nnx", decode_sampling_strategy=strategy, **KEYS[strategy]))


@functools.cache
def drawn():
    """Draws of all strategies in one batch: rows of [strategies, DRAWS]."""
    rows = [settings(strategy) for strategy in KEYS]
    sampling = Sampling(*(jnp.repeat(jnp.array(values), DRAWS) for values in zip(*rows, strict=True)))
    count = len(KEYS) * DRAWS
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(0), seed))(jnp.arange(count))
    tokens, log_probs = jax.jit(draw)(jnp.tile(LOGITS, (count, 1)), sampling, keys, jnp.full(count, 3))
    return np.asarray(tokens).reshape(-1, DRAWS), np.asarray(log_probs).reshape(-1, DRAWS)


@pytest.mark.parametrize("strategy", KEYS)
def test_tokens_have_the_probabilities_of_the_strategy(strategy):
    tokens = drawn()[0][list(KEYS).index(strategy)]
    weights = np.zeros(LOGITS.size)
    kept = list(KEPT[strategy])
    temperature = settings(strategy).temperature
    weights[kept] = np.exp(LOGITS[kept] / temperature) if temperature else 1
    expected = weights / weights.sum()
    found = np.bincount(tokens, minlength=LOGITS.size) / DRAWS
    assert set(np.flatnonzero(found)) == set(kept)
    # Five standard deviations of a share.
    np.testing.assert_array_less(np.abs(found - expected), 5 * np.sqrt(0.25 / DRAWS))


def test_log_probabilities_are_those_of_the_model():
    tokens, log_probs = drawn()
    expected = LOGITS - np.log(np.exp(LOGITS).sum())
    np.testing.assert_allclose(log_probs, expected[tokens], rtol=1e-5)


def test_a_row_draws_the_same_whatever_strategy_the_others_have():
    logits = np.random.default_rng(0).normal(size=(4, 50))
    keys, position = jnp.stack([sampling_key(i) for i in range(4)]), jnp.arange(4)
    plain = Sampling(jnp.full(4, 0.9), jnp.zeros(4, int), jnp.ones(4))
    mixed = Sampling(jnp.array([0.9, 0.9, 0.0, 2.0]), jnp.array([0, 0, 0, 3]), jnp.array([1.0, 1.0, 1.0, 0.5]))
    alone, among = draw(logits, plain, keys, position).token, draw(logits, mixed, keys, position).token
    np.testing.assert_array_equal(alone[:2], among[:2])
    assert among[2] == logits[2].argmax()


def test_keys_of_seeds_samples_and_positions_differ():
    logits = np.zeros((6, 1000))
    keys = [sampling_key(0), sampling_key(1), sampling_key(0, 1), sampling_key(0), sampling_key(0), sampling_key(0)]
    position = jnp.array([0, 0, 0, 1, 2, 0])
    tokens = draw(logits, Sampling(*map(jnp.full, [6] * 3, Sampling())), jnp.stack(keys), position).token.tolist()
    assert len(set(tokens)) == 5
    assert tokens[0] == tokens[5]


def test_a_nucleus_ends_with_the_token_that_reaches_its_probability():
    """Four equally likely tokens: their probabilities and sums are exact in float32."""
    count = 64
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), jnp.arange(count))
    for p, kept in ((0.25, 1), (0.375, 2), (0.5, 2), (0.75, 3), (0.875, 4)):
        sampling = Sampling(jnp.ones(count), jnp.zeros(count, int), jnp.full(count, p))
        tokens = draw(jnp.tile(jnp.array([0.0, 0, -jnp.inf, 0, 0]), (count, 1)), sampling, keys, jnp.zeros(count, int))
        assert set(tokens.token.tolist()) == set([0, 1, 3, 4][:kept]), p

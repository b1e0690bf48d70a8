"""Sampling: histograms against the distribution of each strategy, and candidates against a full sort of each row."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny_config

from trainer.inference import sampling as drawing
from trainer.inference.sampling import CANDIDATES, Sampling, request_keys, sampling_of, wrapped

LOGITS = np.array([2.0, 1.0, 0.5, 0.5, -1.0, 1.5, -3.0])
DRAWS = 20_000
ROWS = 64  # of most tests, which thus share programs
KEYS = {
    "greedy": {},
    "weighted": {"decode_sampling_temperature": 1.7},
    "topk": {"decode_sampling_temperature": 0.8, "decode_sampling_top_k": 4},
    "nucleus": {"decode_sampling_temperature": 1.3, "decode_sampling_nucleus_p": 0.7},
    "composite": {"decode_sampling_temperature": 1.0, "decode_sampling_top_k": 3, "decode_sampling_nucleus_p": 0.8},
}
# Tokens by decreasing probability: 0, 5, 1, then 2 and 3 (equal). Softmax: 0.40, 0.24, 0.15, 0.09, 0.09, ...
KEPT = {"greedy": [0], "weighted": range(7), "topk": [0, 5, 1, 2], "nucleus": [0, 5, 1], "composite": [0, 5, 1]}
# Among the top three, tokens 0 and 5 have 0.81 of the probability.
KEPT["composite"] = [0, 5]


# Compiled once per shape; only the test that inspects the computation traces it again.
draw = jax.jit(drawing.draw)


@jax.jit
def keys_of(requests):
    """Returns the keys of requests (seed, sample) [b, 2]."""
    return wrapped(request_keys(requests))


def settings(strategy):
    return sampling_of(tiny_config("nnx", decode_sampling_strategy=strategy, **KEYS[strategy]))


@functools.cache
def drawn():
    """Returns draws of all strategies, made in one batch: [strategies, DRAWS]."""
    rows = [settings(strategy) for strategy in KEYS]
    types = np.float32, np.int32, np.float32
    columns = zip(zip(*rows, strict=True), types, strict=True)
    sampling = Sampling(*(np.repeat(np.array(values, dtype), DRAWS) for values, dtype in columns))
    count = len(KEYS) * DRAWS
    keys = keys_of(np.stack([np.arange(count), np.zeros(count, int)], axis=1))
    tokens = draw(np.tile(LOGITS, (count, 1)), sampling, keys, np.full(count, 3))
    return np.asarray(tokens).reshape(-1, DRAWS)


@pytest.mark.parametrize("strategy", KEYS)
def test_tokens_have_the_probabilities_of_the_strategy(strategy):
    tokens = drawn()[list(KEYS).index(strategy)]
    weights = np.zeros(LOGITS.size)
    kept = list(KEPT[strategy])
    temperature = settings(strategy).temperature
    weights[kept] = np.exp(LOGITS[kept] / temperature) if temperature else 1
    expected = weights / weights.sum()
    found = np.bincount(tokens, minlength=LOGITS.size) / DRAWS
    assert set(np.flatnonzero(found)) == set(kept)
    # Five standard deviations of a frequency.
    np.testing.assert_array_less(np.abs(found - expected), 5 * np.sqrt(0.25 / DRAWS))


def test_a_row_draws_the_same_whatever_strategy_the_others_have():
    logits = np.random.default_rng(0).normal(size=(ROWS, 1000))
    keys, position = keys_of(np.stack([np.arange(ROWS), np.zeros(ROWS, int)], axis=1)), np.arange(ROWS)
    plain = Sampling(np.full(ROWS, 0.9), np.zeros(ROWS, int), np.ones(ROWS))
    mixed = Sampling(*(np.resize(each, ROWS) for each in ([0.9, 0.9, 0.0, 2.0], [0, 0, 0, 3], [1.0, 1.0, 1.0, 0.5])))
    alone = np.asarray(draw(logits, plain, keys, position))
    for others in (mixed, mixed._replace(top_k=plain.top_k, nucleus_p=plain.nucleus_p)):
        among = np.asarray(draw(logits, others, keys, position))
        for i in (0, 1):
            np.testing.assert_array_equal(alone[i::4], among[i::4])
        np.testing.assert_array_equal(among[2::4], logits[2::4].argmax(-1))


def test_keys_of_seeds_samples_and_positions_differ():
    keys = keys_of(np.resize([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0], [0, 0]], (ROWS, 2)))
    position = np.resize([0, 0, 0, 1, 2, 0], ROWS)
    sampling = Sampling(*map(np.full, [ROWS] * 3, Sampling()))
    tokens = draw(np.zeros((ROWS, 1000)), sampling, keys, position).tolist()
    assert len(set(tokens)) == 5
    assert tokens[0] == tokens[5]


def test_a_nucleus_ends_with_the_token_that_reaches_its_probability():
    """Four equally likely tokens, so that probabilities and their sums are exact in float32."""
    keys = keys_of(np.stack([np.zeros(ROWS, int), np.arange(ROWS)], axis=1))
    logits = np.tile(np.array([0.0, 0, -np.inf, 0, 0, -np.inf, -np.inf]), (ROWS, 1))
    for p, kept in {0.25: 1, 0.375: 2, 0.5: 2, 0.75: 3, 0.875: 4}.items():
        sampling = Sampling(np.ones(ROWS), np.zeros(ROWS, int), np.full(ROWS, p))
        found = draw(logits, sampling, keys, np.zeros(ROWS, int))
        assert set(found.tolist()) == set([0, 1, 3, 4][:kept]), p


def definition_of_kept(logits, top_k, nucleus_p):
    """The definition, by sorting the vocabulary."""
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    within = (top_k[:, None] == 0) | (jnp.arange(logits.shape[-1]) < top_k[:, None])
    probability = jax.nn.softmax(jnp.where(within, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    within &= (nucleus_p[:, None] >= 1) | (before < nucleus_p[:, None])
    return jnp.zeros_like(within).at[jnp.arange(len(logits))[:, None], order].set(within)


@jax.jit
def definition(logits, sampling, keys, position):
    """Draws noise for every token of every row, without candidates. Returns the tokens, and a mask of the tokens that
    may be drawn."""
    kept = definition_of_kept(logits, sampling.top_k, sampling.nucleus_p)
    chosen = jnp.where(kept, logits, -jnp.inf)
    scaled = chosen / jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
    drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in)(keys, position), scaled)
    return jnp.where(sampling.temperature > 0, drawn, logits.argmax(axis=-1)), kept


@jax.jit
def sets_of(logits, sampling):
    """Returns the mask of kept tokens [b, v], the candidates and the mask of kept candidates [b, n], and whether the
    candidates contain all kept tokens [b]."""
    how = sampling.top_k, sampling.nucleus_p
    ranked, candidates = jax.lax.top_k(jnp.where(logits == 0, 0, logits), min(CANDIDATES, logits.shape[-1]))
    return drawing._kept(logits, *how), candidates, *drawing._kept_of_candidates(ranked, logits, *how)


def rows_of_settings(count, size, seed):
    """No nucleus probability is a sum of equal shares, because the last bit of the sum would decide such a case."""
    random = np.random.default_rng(seed)
    top_k = [0, 0, 1, 2, 50, CANDIDATES, CANDIDATES + 1, size - 1, size, size + 5, 2**31 - 1]
    sampling = Sampling(
        np.asarray(random.choice([0, 2e-38, 0.3, 1, 2], count), np.float32),
        np.asarray(random.choice(top_k, count), np.int32),
        np.asarray(random.choice([1, 1e-6, 0.1013, 0.5037, 0.9013, 0.99], count), np.float32),
    )
    return sampling, keys_of(np.stack([np.full(count, seed), np.arange(count)], axis=1)), np.arange(count) * 7


LOGITS_OF_ROWS = {
    "different": lambda random, x: x,
    "ties": lambda random, x: np.round(x),
    "rising with ties": lambda random, x: np.sort(np.round(2 * x) / 2),
    "equal": lambda random, x: np.full_like(x, 1.5),
    "signed zeros": lambda random, x: np.copysign(np.where(x > 0.5, x, 0), random.normal(size=x.shape)),
    "half impossible": lambda random, x: np.where(random.random(x.shape) < 0.5, -np.inf, x),
    "few possible": lambda random, x: np.where(random.random(x.shape) < 0.98, -np.inf, np.round(x)),
    "impossible": lambda random, x: np.full_like(x, -np.inf),
}


@pytest.mark.parametrize("size", [7, CANDIDATES, 1000])
def test_tokens_and_sets_are_those_of_the_definition_over_all_tokens(size):
    random, count, dtypes = np.random.default_rng(size), ROWS, (jnp.float32, jnp.bfloat16)[: 1 + (size == 1000)]
    for (name, change), dtype in itertools.product(LOGITS_OF_ROWS.items(), dtypes):
        x = random.normal(size=(count, size)) * random.choice([0.1, 1, 5, 30], (count, 1))
        given = change(random, x).astype(dtype)
        logits, possible = given.astype(np.float32), np.isfinite(given)
        sampling, keys, position = rows_of_settings(count, size, len(name))
        top_k = np.where(sampling.top_k < size, sampling.top_k, 0)
        tokens, kept = jax.device_get(definition(logits, sampling, keys, position))
        np.testing.assert_array_equal(draw(given, sampling, keys, position), tokens, name)

        found, candidates, of_candidates, enough = jax.device_get(sets_of(logits, sampling._replace(top_k=top_k)))
        kept = kept & possible
        np.testing.assert_array_equal(found & possible, kept, name)
        at_tokens = np.zeros_like(kept)
        np.put_along_axis(at_tokens, candidates, of_candidates, -1)
        limited = enough & ((top_k > 0) | (sampling.nucleus_p < 1))
        assert limited.any() or not possible.any()
        np.testing.assert_array_equal((at_tokens & possible)[limited], kept[limited], name)


def test_each_row_draws_what_it_draws_alone():
    """Rows without settings, and those whose candidates are not enough, make a batch look at all tokens."""
    logits = np.random.default_rng(3).normal(size=(ROWS, 1000)) * np.resize([1, 4, 30], (ROWS, 1))
    sampling, keys, position = rows_of_settings(ROWS, 1000, 3)
    together = draw(logits, sampling, keys, position)
    for i in range(24):
        row = jax.tree.map(lambda array, i=i: array[i : i + 1], (logits, sampling, position))
        assert draw(*row[:2], keys[i : i + 1], row[2])[0] == together[i]


def test_only_what_the_rows_need_is_computed(monkeypatch):
    sizes = []

    def counted(gumbel):
        def call(key, what, **how):
            noise = gumbel(key, what, **how)
            jax.debug.callback(lambda noise: sizes.append(noise.shape[-1]), noise)
            return noise

        return call

    monkeypatch.setattr(drawing, "gumbel_at", counted(drawing.gumbel_at))
    monkeypatch.setattr(jax.random, "gumbel", counted(jax.random.gumbel))
    compiled = jax.jit(lambda *args: drawing.draw(*args))
    logits = np.linspace(0, [40, 0.1], 1000).T  # a nucleus of few tokens, and of many
    keys, position = keys_of(np.zeros((2, 2), int)), np.zeros(2, int)
    cases = [
        ([(0.0, 0, 1.0), (0.0, 5, 0.9)], set()),
        ([(1.0, 5, 1.0), (0.0, 0, 1.0)], {CANDIDATES}),
        ([(1.0, 0, 0.9), (1.0, CANDIDATES, 0.9)], {CANDIDATES}),
        ([(1.0, 0, 0.9), (0.0, 0, 0.9)], {CANDIDATES}),
        ([(1.0, 0, 1.0), (1.0, 2000, 1.0)], {1000}),
        ([(1.0, 5, 1.0), (1.0, 0, 1.0)], {CANDIDATES, 1000}),
        ([(1.0, CANDIDATES + 1, 1.0), (0.0, 0, 1.0)], {CANDIDATES, 1000}),
        ([(0.0, 0, 1.0), (1.0, 0, 0.9)], {CANDIDATES, 1000}),
    ]
    for rows, expected in cases:
        sizes.clear()
        jax.block_until_ready(compiled(logits, Sampling(*map(np.array, zip(*rows, strict=True))), keys, position))
        jax.effects_barrier()
        assert set(sizes) == expected, rows
    assert compiled._cache_size() == 1


def test_nothing_sorts_the_vocabulary():
    """A CPU has a fast top_k, which XLA replaces by a sort if its results are used in certain ways."""
    sampling, keys, position = rows_of_settings(ROWS, 1000, 0)
    compiled = draw.lower(np.zeros((ROWS, 1000)), sampling, keys, position).compile()
    assert " sort(" not in compiled.as_text()

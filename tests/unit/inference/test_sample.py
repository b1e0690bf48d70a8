"""Compares sampling through the cache with full forward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_config

from trainer.backends import StateCodec, make_model
from trainer.inference import sample
from trainer.models.families import init_cache
from trainer.sharding import make_mesh, make_rules, on_mesh
from trainer.state import state_shardings

PROMPT = [5, 0, 17]
ROWS, LENGTH, VOCABULARY = 8, 12, 64
MODEL = {"max_target_length": LENGTH, "vocab_size": VOCABULARY, "logits_via_embedding": True}


@functools.cache
def small():
    """Returns a configuration, its model, and parameters whose most likely token is far ahead of the second."""
    config = tiny_config("nnx", **MODEL)
    model = make_model(config)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    # Changes the signs, so that the tied head does not just repeat the last token.
    params["decoder"]["decoder_norm"]["scale"] *= 8 * np.sign(np.random.default_rng(0).normal(size=16))
    return config, model, params


@functools.cache
def drawn(temperature, seed=0, prompt=tuple(PROMPT)):
    config, model, params = small()

    def draw(params):
        return sample(config, model, params, {}, prompt, rows=ROWS, temperature=temperature, seed=seed)

    return np.asarray(jax.jit(draw)(params))


def logits_after(tokens):
    """Returns the logits that follow each prefix of `tokens` [rows, length], from one forward pass without a cache."""
    config, model, params = small()
    assert tokens.shape == (ROWS, LENGTH)
    return np.asarray(_forward(config, model)(params, tokens))


@functools.cache
def _forward(config, model):
    @jax.jit
    def forward(params, tokens):
        positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
        hidden, _, _ = model.apply(params, {}, tokens, positions, np.ones_like(positions), np.arange(ROWS))
        return model.apply(params, {}, hidden, method="head")[0]

    return forward


def test_temperature_zero_takes_the_likeliest_token_of_full_forward_passes():
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    tokens[:, : len(PROMPT)] = PROMPT
    for t in range(len(PROMPT), LENGTH):
        tokens[:, t] = logits_after(tokens)[:, t - 1].argmax(-1)
    found = drawn(0.0)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, tokens)
    assert len(set(tokens[0].tolist())) > 4, "the continuation should not be one token over and over"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_prompt_is_kept(temperature):
    assert drawn(temperature).shape == (ROWS, LENGTH)
    assert (drawn(temperature)[:, : len(PROMPT)] == PROMPT).all()


def test_one_seed_gives_one_text_and_another_another():
    first, other = drawn(1.0), drawn(1.0, seed=1)
    drawn.cache_clear()
    np.testing.assert_array_equal(drawn(1.0), first)
    assert (other != first).any()
    assert len({row.tobytes() for row in first}) > ROWS / 2  # each row draws independently


def test_the_temperature_divides_the_logits():
    """A low temperature selects nearly the most likely token; a high one is nearly uniform."""
    np.testing.assert_array_equal(drawn(1e-4), drawn(0.0))
    free = drawn(1e6)[:, len(PROMPT) :]
    assert len(np.unique(free)) > VOCABULARY / 3


@pytest.mark.parametrize("length", [0, LENGTH, LENGTH + 1])
def test_a_prompt_must_leave_room(length):
    config, model, params = small()
    with pytest.raises(ValueError, match=f"{length} tokens leaves no room in a row of {LENGTH}"):
        sample(config, model, params, {}, [1] * length, rows=ROWS, temperature=0.0, seed=0)


def test_the_longest_prompt_leaves_one_token():
    found = drawn(0.0, prompt=(1,) * (LENGTH - 1))
    assert (found[:, :-1] == 1).all()
    np.testing.assert_array_equal(found[:, -1], logits_after(found)[:, -2].argmax(-1))


def test_on_eight_devices_it_draws_the_same_text():
    axes = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    config = tiny_config("nnx", devices=8, **MODEL, **axes)
    model = make_model(config)
    codec = StateCodec(model, optax.sgd(0.1))
    mesh, rules = make_mesh(config, jax.devices()), make_rules(config.logical_axis_rules)
    shardings = codec.unpack(state_shardings(model, codec.abstract, mesh, rules)).params
    params = jax.device_put(small()[2], shardings)

    def draw(params):
        with on_mesh(mesh, rules):
            return sample(config, model, params, {}, PROMPT, rows=ROWS, temperature=0.0, seed=0)

    np.testing.assert_array_equal(jax.jit(draw)(params), drawn(0.0))


# Settings of a block's attention, other than its inputs, that must also apply through the cache.
VARIANTS = {
    "all tokens": {},
    "window": {"attention_type": "local_sliding", "sliding_window_size": 4},
    "window, blockwise": {"attention_type": "local_sliding", "sliding_window_size": 5, "attention": "blockwise"},
    "soft cap": {"attn_logits_soft_cap": 0.05},
    "head norms and yarn": {
        "use_qk_norm": True,
        "rope_type": "yarn",
        "original_max_position_embeddings": 4,
        "rope_factor": 4.0,
    },
}


@functools.cache
def logits_of(variant):
    """Returns logits of one row, [length, vocab], twice: through the cache, three tokens and then one by one; and
    without a cache."""
    config = tiny_config("nnx", **MODEL, **{"attention": "dot_product"} | VARIANTS[variant])
    model = make_model(config)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, LENGTH)).astype(np.int32)

    def both(key):
        params, _ = model.init(key)
        # Sharper scores, so that it matters which tokens are visible.
        attention = params["decoder"]["layers"]["self_attention"]
        attention["query"]["kernel"] *= 10

        def logits(tokens, positions, cache, segments):
            hidden, _, cache = model.apply(
                params, {}, tokens, positions, segments, jnp.zeros(1, jnp.int32), cache=cache
            )
            return cache, model.apply(params, {}, hidden, method="head")[0][0]

        def step(cache, position):
            token = jax.lax.dynamic_slice(tokens, (0, position), (1, 1))
            return logits(token, position[None, None], cache, jnp.ones_like(token))

        # Padding has the first position, as in a batch. It must not be written to that place of the cache.
        real = jnp.arange(LENGTH)[None] < 3
        positions = jnp.where(real, jnp.arange(LENGTH)[None], 0)
        cache, first = logits(tokens, positions, init_cache(config, 1, LENGTH), real.astype(jnp.int32))
        alone = jax.lax.scan(step, cache, jnp.arange(3, LENGTH))[1][:, 0]
        together = logits(tokens, jnp.arange(LENGTH)[None], None, jnp.ones_like(tokens))[1]
        return jnp.concatenate([first[:3], alone]), together

    return jax.device_get(jax.jit(both)(jax.random.key(0)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_through_the_cache_the_logits_are_those_of_the_whole_row(variant):
    alone, together = logits_of(variant)
    # The same sums in another order, in float32. Logits are of order 1.
    np.testing.assert_allclose(alone, together, atol=2e-5)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "all tokens"])
def test_what_these_variants_change_is_far_beyond_the_tolerance(variant):
    assert np.abs(logits_of(variant)[1] - logits_of("all tokens")[1]).max() > 1e-2

"""Decoding through the cache against full forward passes, with windows, soft caps, head norms and YaRN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import random_variables, tiny_config

from trainer.backends.registry import make_model
from trainer.models.caches import init_cache

LENGTH, VOCABULARY = 12, 64
MODEL = {"max_target_length": LENGTH, "vocab_size": VOCABULARY, "logits_via_embedding": True}

VARIANTS = {
    "all tokens": {},
    "every option": {
        **{"attention_type": "local_sliding", "sliding_window_size": 5, "attention": "blockwise"},
        **{"attn_logits_soft_cap": 0.05, "use_qk_norm": True},
        **{"rope_type": "yarn", "original_max_position_embeddings": 4, "rope_factor": 4.0},
    },
}


@functools.cache
def logits_of(variant):
    """Returns the logits of one row [length, vocab] twice: through the cache (three tokens, then one by one), and
    without it."""
    config = tiny_config("nnx", **MODEL, **{"attention": "dot_product"} | VARIANTS[variant])
    model = make_model(config)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, LENGTH)).astype(np.int32)

    params, _ = random_variables(model)
    # Sharper scores make the result depend on the context.
    params["decoder"]["layers"]["self_attention"]["query"]["kernel"] *= 10

    def both(params):
        def logits(tokens, positions, cache, segments):
            hidden, _, cache = model.apply(
                params, {}, tokens, positions, segments, jnp.zeros(1, jnp.int32), cache=cache
            )
            return cache, model.apply(params, {}, hidden, method="head")[0][0]

        def step(cache, position):
            token = jax.lax.dynamic_slice(tokens, (0, position), (1, 1))
            return logits(token, position[None, None], cache, jnp.ones_like(token))

        # As in a batch, padding has position 0, but must not be written there.
        real = jnp.arange(LENGTH)[None] < 3
        positions = jnp.where(real, jnp.arange(LENGTH)[None], 0)
        cache, first = logits(tokens, positions, init_cache(config, 1, LENGTH), real.astype(jnp.int32))
        alone = jax.lax.scan(step, cache, jnp.arange(3, LENGTH))[1][:, 0]
        together = logits(tokens, jnp.arange(LENGTH)[None], None, jnp.ones_like(tokens))[1]
        return jnp.concatenate([first[:3], alone]), together

    return jax.device_get(jax.jit(both)(params))


@pytest.mark.parametrize("variant", VARIANTS)
def test_through_the_cache_the_logits_are_those_of_the_whole_row(variant):
    alone, together = logits_of(variant)
    # Float32 sums in another order; logits are of the order of 1.
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_what_the_options_change_is_far_beyond_the_tolerance():
    assert np.abs(logits_of("every option")[1] - logits_of("all tokens")[1]).max() > 1e-2

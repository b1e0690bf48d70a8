"""The 8-bit cache: its bytes, the change of logits and losses, and that splitting a text changes nothing."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, random_variables, tiny_config

from trainer.backends.registry import make_model
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler
from trainer.layers.cache import Cache
from trainer.models.caches import PLACES, cache_axes, init_cache
from trainer.ops.scaled import Scaled
from trainer.products.context import Context
from trainer.sharding import Axes

LENGTH, ROWS, LAYERS = 12, 2, 2
MODEL = {"max_target_length": LENGTH, "attention": "dot_product"}
KINDS = {
    "heads": {},
    "window": {"attention_type": "local_sliding", "sliding_window_size": 4},
    "latents": {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "num_experts": 4}
    | {
        "base_moe_mlp_dim": 8,
        "shared_experts": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "first_num_dense_layers": 1,
    },
    "state": {"decoder_block": "other_shapes:FAMILY"},
}
FORMATS = {
    f"{dtype}, {axis}": {"quantize_kvcache": True, "kv_quant_dtype": dtype, "kv_quant_axis": axis}
    for dtype, axis in itertools.product(("int8", "fp8"), ("dkv", "heads_and_dkv"))
}


def config_of(kind, form=None):
    return tiny_config("nnx", **MODEL | KINDS[kind] | (FORMATS[form] if form else {}))


@pytest.mark.parametrize("form", ["int8, dkv", "fp8, heads_and_dkv"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_take_a_byte_and_each_token_or_each_of_its_heads_a_scale(kind, form):
    def leaves(form):
        config = config_of(kind, form)
        axes = jax.tree.leaves(cache_axes(config), is_leaf=lambda it: isinstance(it, Axes))
        return list(zip(axes, jax.tree.leaves(jax.eval_shape(lambda: init_cache(config, ROWS, LENGTH))), strict=True))

    expected = []
    for names, array in leaves(None):
        if PLACES not in names:
            expected.append((names, array.shape, jnp.float32))
            continue
        alone = "dkv" in form.split(", ") and array.ndim == 5  # latents have no heads axis
        stored = jnp.int8 if "int8" in form else jnp.float8_e4m3fn
        kept = 4 if alone else 3
        scale = array.shape[:kept] + (1,) * (array.ndim - kept)
        scale_names = names[:kept] + (None,) * (array.ndim - kept)
        expected += [(names, array.shape, stored), (scale_names, scale, jnp.float32)]
    assert [(tuple(names), array.shape, array.dtype) for names, array in leaves(form)] == [
        (tuple(names), shape, dtype) for names, shape, dtype in expected
    ]
    if kind == "heads":
        places = LAYERS * ROWS * LENGTH * 2  # of keys and values
        scales = 2 if "heads_and" not in form else 1
        assert sum(math.prod(it.shape) * it.dtype.itemsize for _, it in leaves(form)) == places * (2 * 8 + 4 * scales)


@functools.cache
def logits_of(kind, form):
    """Returns the logits [length, vocab] of one row without a cache; with a cache, in one call and in parts; and those
    of the last part after the scales of the heads were rotated (None except for FAULTY). Also returns the tokens."""
    config = config_of(kind, form)
    model = make_model(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, LENGTH)).astype(np.int32)

    # Large enough that scores are sharp and the result depends on the context.
    draw = np.random.default_rng(1)
    params, rest = jax.tree.map(lambda it: draw.normal(scale=0.5, size=it.shape).astype(it.dtype), model.abstract)

    def all_of(params):
        def run(cache, first, last):
            positions = jnp.arange(first, last)[None]
            segments, row = jnp.ones_like(positions), jnp.zeros(1, jnp.int32)
            hidden, _, cache = model.apply(params, rest, tokens[:, first:last], positions, segments, row, cache=cache)
            return model.apply(params, rest, hidden, method="head")[0][0], cache

        cache, parts = init_cache(config, 1, LENGTH), []
        whole, faulty = run(cache, 0, LENGTH)[0], None
        for first, last in itertools.pairwise(ENDS[kind]):
            if first and (kind, form) == FAULTY:
                faulty = run(dataclasses.replace(cache, entries=of_another_head(cache.entries)), first, last)[0]
            logits, cache = run(cache, first, last)
            parts.append(logits)
            cache = dataclasses.replace(cache, filled=True)
        return run(None, 0, LENGTH)[0], whole, jnp.concatenate(parts), faulty

    exact, *others = jax.device_get(jax.jit(all_of)(params))
    return exact, others, tokens[0]


def of_another_head(entries):
    return jax.tree.map(
        lambda it: it._replace(scale=jnp.roll(it.scale, 1, axis=-2)), entries, is_leaf=lambda it: isinstance(it, Scaled)
    )


def loss(logits, tokens):
    logits = logits[:-1]
    likelihood = np.take_along_axis(logits, tokens[1:, None], axis=-1)[:, 0] - np.log(np.exp(logits).sum(axis=-1))
    return -likelihood.mean()


FAULTY = ("heads", "int8, dkv")
# The ends of the parts. A ring is read differently if several tokens follow.
ENDS = {"heads": (0, 7, LENGTH), "window": (0, 5, 11, LENGTH), "latents": (0, 7, LENGTH)}
# Upper bounds of the relative change of the logits: the measured change and a margin of half for other processors.
CASES = {
    FAULTY: 0.0075,
    ("window", "fp8, heads_and_dkv"): 0.054,
    ("latents", "fp8, dkv"): 0.053,
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_loss_are_near_and_the_division_of_a_text_changes_nothing(case):
    exact, (whole, parts, faulty), tokens = logits_of(*case)
    size = np.linalg.norm(exact)
    changed = np.linalg.norm(parts - exact) / size
    assert CASES[case] / 10 < changed < CASES[case]
    assert abs(loss(parts, tokens) - loss(exact, tokens)) < 0.003
    # Sums in another order may move a value across a rounding boundary; measured: 5e-7.
    assert np.linalg.norm(parts - whole) < changed / 10 * size
    if case == FAULTY:
        last = exact[-len(faulty) :]
        assert np.linalg.norm(faulty - last) > 10 * CASES[case] * np.linalg.norm(last)


@pytest.mark.rest(covered_by="the same on one device; unit/inference/test_engine.py on eight")
def test_on_eight_devices_chunks_kept_prefixes_and_packed_prompts_give_what_a_whole_row_gives():
    """Each token that the engine draws is the likeliest after one call on the whole text before it."""
    axes = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    keys = FORMATS["int8, dkv"] | {"max_target_length": 24, "return_log_prob": True}
    parts = {"use_chunked_prefill": True, "prefill_chunk_size": 5, "enable_prefix_caching": True}
    config = tiny_config("nnx", devices=8, per_device_batch_size=1, **axes, **keys, **parts)
    engine = MaxEngine(config, jax.devices())
    one = tiny_config("nnx", **keys)
    model = make_model(one)
    alone = random_variables(model)
    params = engine.hold(*alone)

    @jax.jit
    def whole(tokens):
        positions = jnp.arange(24)[None]
        cache = init_cache(one, 1, 24)
        hidden = model.apply(*alone, tokens, positions, jnp.ones_like(positions), jnp.zeros(1, int), cache=cache)[0]
        return jax.nn.log_softmax(model.apply(*alone, hidden, method="head")[0][0])

    def check(tokens, drawn):
        row = np.zeros((1, 24), np.int32)
        row[0, : len(tokens)] = tokens
        likeliest = whole(row)[len(tokens) - 1]
        # Sums in another order, which may move values across a rounding boundary.
        np.testing.assert_allclose(likeliest[int(drawn[0])], drawn[1], rtol=1e-3)
        np.testing.assert_allclose(likeliest.max(), drawn[1], rtol=1e-3)

    scheduler, begin = Scheduler(engine, params), list(range(3, 14))
    for prompt in ([*begin, 40], [*begin, 41, 42], [7, 9]):
        number = scheduler.submit(prompt, limit=4, sampling=Sampling(0.0))
        for event in scheduler.run():
            if event.request == number and event.token is not None:
                check(prompt, (event.token, event.log_prob))
                prompt = [*prompt, event.token]
    scales = {leaf.sharding.spec for leaf in jax.tree.leaves(scheduler._state.cache) if leaf.shape[-1] == 1}
    assert len(scales) == 1
    assert all(name in str(scales) for name in ("data", "fsdp", "tensor"))
    prompts = [[5, 0, 17], [9, 2]]
    _, result = engine.prefill_concat(params, *engine.packed(prompts), sampling=Sampling(0.0))
    for prompt, *drawn in zip(prompts, result.tokens, result.log_probs, strict=True):
        check(prompt, drawn)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_every_combination_takes_and_returns_it(combination):
    config = tiny_config(combination, **MODEL, **FORMATS["int8, dkv"])
    model, one = make_model(config), np.ones((ROWS, 1), np.int32)
    cache = jax.eval_shape(lambda: init_cache(config, ROWS, LENGTH))
    apply = lambda variables, cache: model.apply(*variables, one, one, one, one[:, 0], cache=cache)[2]  # noqa: E731
    after = jax.eval_shape(apply, model.abstract, cache)
    assert jax.tree.map(lambda it: (it.shape, it.dtype), after.entries) == jax.tree.map(
        lambda it: (it.shape, it.dtype), cache.entries
    )


def test_no_entry_becomes_an_integer_without_a_scale():
    context = Context(jnp.zeros((1, 1), int), jnp.ones((1, 1), int), jnp.zeros(1, int), None)
    with pytest.raises(AssertionError, match="int8 has no scale for entries of float32"):
        Cache(jnp.zeros((1, 1, 2, 4), jnp.int8), 0).write(jnp.ones((1, 1, 4)), context)

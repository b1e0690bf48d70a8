"""The caches of a stack: what a write changes, and that a loop over tokens updates the caches in place."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import EXACT
from flax import nnx
from support import tiny_config

from trainer.backends.registry import make_model
from trainer.layers.attention import OPS, Attention, KVCache
from trainer.layers.cache import Cache
from trainer.models.caches import init_cache
from trainer.ops.rope import Rope
from trainer.ops.temperature import Temperature
from trainer.products.context import Context

LAYERS, ROWS, LENGTH = 3, 2, 5
LONG = 1000  # so that one cache is larger than all other temporaries


def test_a_write_changes_its_places_in_one_layer_and_padding_writes_nothing():
    entries = np.zeros((LAYERS, ROWS, LENGTH, 2), np.float32)
    new = np.arange(1, 1 + ROWS * 3 * 2, dtype=np.float32).reshape(ROWS, 3, 2)
    places, segments = np.array([[0, 1, 0], [2, 3, 4]]), np.array([[1, 1, 0], [0, 4, 4]])
    context = Context(places, segments, np.arange(ROWS), None)

    @jax.jit
    def run(entries, new):
        cache = Cache({"a": entries}, jnp.int32(1)).write({"a": new}, context)
        read = cache.read()["a"]
        return cache.entries["a"], read, cache.replace({"a": read + 1}).entries["a"]

    written, read, replaced = run(entries, new)
    expected = np.zeros(entries.shape, np.float32)
    expected[1, 0, [0, 1]] = new[0, :2]
    expected[1, 1, [3, 4]] = new[1, 1:]
    np.testing.assert_array_equal(written, expected)
    np.testing.assert_array_equal(read, expected[1])
    np.testing.assert_array_equal(replaced, expected + np.array([0, 1, 0])[:, None, None, None])


def test_a_ring_keeps_the_last_positions_of_each_text_and_packed_texts_go_to_their_rows():
    """Two texts of four and six positions in one row, with padding between them. The cache has three slots per text."""
    positions = np.array([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]])
    segments = np.array([[1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 2]])
    new = np.arange(11, dtype=np.float32)[None, :, None]

    @jax.jit
    def written(new):
        empty = Cache({"a": jnp.full((1, 2, 3, 1), -1.0)}, 0, rows=np.maximum(segments - 1, 0))
        return empty.write({"a": new}, Context(positions, segments, np.arange(1), None)).entries["a"]

    np.testing.assert_array_equal(np.asarray(written(new))[0, :, :, 0], [[3, 1, 2], [8, 9, 10]])


def test_no_place_of_a_ring_is_written_twice():
    """The result of two writes to one slot is undefined, so the order of the tokens must not matter."""

    @jax.jit
    def written(positions):
        empty = Cache({"a": jnp.full((1, 1, 3, 1), -1.0)}, 0)
        context = Context(positions, jnp.ones_like(positions), np.arange(1), None)
        return empty.write({"a": positions[..., None].astype(jnp.float32)}, context).entries["a"]

    for order in (1, -1):
        found = written(np.arange(7)[None, ::order])
        np.testing.assert_array_equal(np.asarray(found)[0, 0, :, 0], [6, 4, 5])


@pytest.mark.parametrize("filled", [False, True])
def test_the_op_is_that_of_training_until_there_are_earlier_positions(filled, monkeypatch):
    """A kernel computes the attention that fills the cache. Reading from it needs the reference op, because keys and
    queries have different indices."""
    calls = []

    def op(name, query, key, value, mask, dropout, **settings):
        calls.append((name, key.shape[1]))
        return query

    for name in OPS:
        monkeypatch.setitem(OPS, name, functools.partial(op, name))
    dtypes = {"dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32")}
    settings = {"heads": 2, "kv_heads": 1, "head_dim": 4, "rope": Rope(1, 10000), "op": "blockwise"}
    layer = Attention(8, rngs=nnx.Rngs(0), **settings, **dtypes)
    position = np.tile(np.arange(3), (ROWS, 1))
    context = Context(position, np.ones_like(position), np.arange(ROWS), None)

    @jax.jit
    def filled_by(x):
        entries = jax.tree.map(lambda array: array[None], layer.init_cache(ROWS, LENGTH))
        return layer(x, Cache(entries, 0, filled=filled), context)[1].entries

    entries = filled_by(np.ones((ROWS, 3, 8), np.float32))
    assert calls == [("dot_product", LENGTH) if filled else ("blockwise", 3)]
    assert isinstance(entries, KVCache)
    written = np.asarray(entries.value).any(axis=(3, 4))
    np.testing.assert_array_equal(written, np.tile(np.arange(LENGTH) < 3, (1, ROWS, 1)))


@pytest.mark.parametrize("scan", [True, False])
def test_a_loop_over_tokens_updates_its_caches_in_place(scan):
    """In the compiled loop, only the cache updates produce an array of the cache's size: no copy, no concatenation."""
    config = tiny_config("nnx", base_num_decoder_layers=LAYERS, scan_layers=scan, max_target_length=LONG)
    model = make_model(config)
    params, rest = model.abstract
    cache = jax.eval_shape(lambda: init_cache(config, ROWS, LONG))
    ids, row = np.ones((ROWS, 1), np.int32), np.arange(ROWS)

    def decode(params, rest, cache):
        def step(cache, position):
            _, _, cache = model.apply(params, rest, ids, jnp.full_like(ids, position), ids, row, cache=cache)
            return cache, None

        start = model.apply(params, rest, ids, ids, ids, row, cache=cache)[2]
        return jax.lax.scan(step, start, jnp.arange(1, 11))[0]

    compiled = jax.jit(decode, donate_argnums=2).lower(params, rest, cache).compile(EXACT)
    text = compiled.as_text()
    key = jax.tree.leaves(cache.entries)[0]
    assert len(key) == (LAYERS if scan else 1)
    nbytes = key.size * key.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < nbytes * LAYERS / len(key)
    shape = ",".join(map(str, key.shape))
    made = set(re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", text))
    assert made >= {"scatter"}
    assert made <= {"scatter", "fusion", "parameter", "get-tuple-element", "bitcast"}


@pytest.mark.parametrize("parts", [(17,), (4, 3, 1, 1, 6, 2), (1,) * 17])
def test_attention_in_chunks_over_a_cache_equals_that_of_the_whole_text(parts):
    """The ring is as long as a chunk. Chunks follow prefills of several lengths and single tokens. Includes a
    temperature."""
    dtypes = {"dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32")}
    how = {"rope": Rope(1, 10000), "op": "blockwise", "window": 5, "temperature": Temperature(0.5, 3, first=1)}
    layer = Attention(8, heads=2, kv_heads=1, head_dim=4, chunked=True, **how, **dtypes, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(ROWS, 17, 8)).astype(np.float32)

    def of(start, stop):
        position = np.tile(np.arange(start, stop), (ROWS, 1))
        return x[:, start:stop], Context(position, np.ones_like(position), np.arange(ROWS), None)

    inputs, context = of(0, 17)
    run = jax.jit(lambda inputs, cache, context: layer(inputs, cache, context))
    expected, _ = run(inputs, None, context)
    cache, start, found = Cache(jax.tree.map(lambda array: array[None], layer.init_cache(ROWS, 17)), 0), 0, []
    assert cache.entries.key.shape == (1, ROWS, 5, 1, 4)
    for size in parts:
        inputs, context = of(start, start + size)
        out, cache = run(inputs, cache, context)
        cache, start = dataclasses.replace(cache, filled=True), start + size
        found.append(out)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-6)
    window = Attention(8, heads=2, kv_heads=1, head_dim=4, **how, **dtypes, rngs=nnx.Rngs(0))
    inputs, context = of(0, 17)
    assert np.abs(window(inputs, None, context)[0] - expected)[:, 6:].max() > 0.01

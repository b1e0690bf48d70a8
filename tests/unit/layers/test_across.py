"""Context parallelism: every strategy computes what one device computes, forward and backward."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.aot.cost import analyze
from trainer.layers.across import Across
from trainer.layers.attention import OPS, Scores
from trainer.ops.attention import Mask
from trainer.ops.order import reorder, restored
from trainer.ops.random import seed_key
from trainer.ops.splash import splash_attention
from trainer.products.context import Context
from trainer.sharding import on_mesh

B, T, D, V = 2, 32, 8, 4
FAR = 256  # length of a row with splash: 128 tokens on each of two devices
LENGTHS = ("activation_length", "activation_q_length", "activation_kv_length")
RULES = {
    "activation_batch": ("data",),
    **dict.fromkeys(LENGTHS, ("context", "ulysses")),
    **dict.fromkeys(("activation_heads", "activation_kv_heads"), ("tensor",)),
}
SIZES = {"data": 1, "context": 4, "ulysses": 1, "tensor": 2}
SPLIT = {"all_gather": {}, "ring": {}, "ulysses": {}, "usp": {"context": 2, "ulysses": 2}}
VARIANTS = {
    "plain": {},
    "window, soft cap": {"window": 7, "soft_cap": 2.0, "scale": 1.0},
    "chunks, sinks, dropout": {"window": 6, "chunked": True, "sinks": True, "dropout_rate": 0.3},
    "sinks": {"sinks": True},
    "long chunks, sinks": {"window": 100, "chunked": True, "sinks": True},
}


def mesh_of(**sizes):
    sizes = SIZES | sizes
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def batch(heads=8, kv_heads=4, dtype=jnp.float32, length=T):
    """Returns rows of three documents and padding. The documents end at different indices in the two rows."""
    rng = np.random.default_rng(0)
    position, segment = np.zeros((B, length), int), np.zeros((B, length), int)
    for row, ends in enumerate(((5, 16, 30), (11, 12, 32))):
        ends = [0, *(end * length // T for end in ends), length]
        for k, (start, end) in enumerate(itertools.pairwise(ends), start=1):
            position[row, start:end], segment[row, start:end] = np.arange(end - start), k % 4
    arrays = {
        "query": rng.normal(size=(B, length, heads, D)).astype(dtype),
        "key": rng.normal(size=(B, length, kv_heads, D)).astype(dtype),
        "value": rng.normal(size=(B, length, kv_heads, V)).astype(dtype),
        "position": position,
        "segment": segment,
        "weight": rng.normal(size=(B, length, heads, V)).astype(np.float32),
    }
    return {name: array.astype(np.int32) if array.dtype == int else array for name, array in arrays.items()}


def results(arrays, scores, sinks=None):
    """Returns the attention output, and the gradients of a weighted sum of it."""
    mask = Mask(arrays["position"], arrays["position"], arrays["segment"], arrays["segment"])
    key = seed_key(3) if scores.dropout_rate else None
    context = Context(arrays["position"], arrays["segment"], np.arange(B, dtype=np.int32), key)

    def attended(*operands):
        return scores.attend(*operands[:3], mask, context, *operands[3:])

    @jax.jit
    def both(*operands):
        out, pull = jax.vjp(attended, *operands)
        return out, pull(arrays["weight"].astype(out.dtype))

    extra = () if sinks is None else (sinks,)
    out, grads = jax.device_get(both(*(arrays[name] for name in ("query", "key", "value")), *extra))
    return {"out": out, **dict(zip(("query", "key", "value", "sinks"), grads, strict=False))}


def settings_of(variant, heads=8):
    """Returns the settings of `Scores`, and one sink per head or None."""
    settings = dict(VARIANTS[variant])
    return settings, np.linspace(-1, 2, heads, dtype=np.float32) if settings.pop("sinks", False) else None


@functools.cache
def on_one_device(variant, **given):
    settings, sinks = settings_of(variant, given.get("heads", 8))
    return results(batch(**given), Scores("dot_product", **settings), sinks)


def close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        one, other = (np.asarray(x[name], np.float32) for x in (found, expected))
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max(), name


def both_ways(strategy, op, variant, ordered="", n=4, sizes=None, **given):
    """Returns the results on a mesh, restored to the original order, and those on one device."""
    settings, sinks = settings_of(variant, given.get("heads", 8))
    arrays = batch(**given)
    placed = reorder(arrays, n, ordered) if ordered else arrays
    with on_mesh(mesh_of(**(SPLIT[strategy] if sizes is None else sizes)), RULES):
        found = results(placed, Scores(op, across=Across(strategy, ordered), **settings), sinks)
    whole = {name: x for name, x in found.items() if name != "sinks"}
    found |= restored(whole, n, ordered) if ordered else {}
    return found, on_one_device(variant, **given)


# A dropout mask depends on the index in the row, so reordering would change it. ops/test_ring.py tests windows without
# reordering.
@pytest.mark.parametrize(
    ("strategy", "variant", "ordered"),
    [(strategy, "chunks, sinks, dropout", "") for strategy in SPLIT]
    + [(strategy, "window, soft cap", "striped") for strategy in ("all_gather", "ring")]
    + [("ring", "window, soft cap", "dual_chunk_swap"), ("usp", "window, soft cap", "")],
)
def test_it_is_the_attention_of_one_device(strategy, variant, ordered):
    close(*both_ways(strategy, "blockwise", variant, ordered), 1e-5)


def test_bfloat16():
    """Sums are float32, but queries, keys and weights have 8 significant bits: 2^-7 of the largest entry."""
    for strategy in ("all_gather", "usp"):  # usp is ulysses around a ring
        close(*both_ways(strategy, "blockwise", "plain", dtype=jnp.bfloat16), 2**-7)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (12, 6)])
def test_heads_of_keys_are_repeated_where_there_are_fewer_than_devices(heads, kv_heads):
    found = both_ways("ulysses", "dot_product", "sinks", sizes={"tensor": 1}, heads=heads, kv_heads=kv_heads)
    close(*found, 1e-5)


@pytest.mark.parametrize(("strategy", "ordered"), [("all_gather", "dual_chunk_swap"), ("ulysses", "")])
def test_splash(strategy, ordered, monkeypatch):
    """Runs in Pallas's interpreter."""
    monkeypatch.setitem(OPS, "splash", functools.partial(splash_attention, interpret=True))
    how = {"sizes": {"context": 2, "tensor": 1}, "heads": 2, "kv_heads": 2, "length": FAR}
    close(*both_ways(strategy, "splash", "long chunks, sinks", ordered, 2, **how), 1e-5)


def test_between_processes_on_cpus_all_arrays_pass_as_one(monkeypatch):
    """Gloo mixes up the data of concurrent permutes: losses were wrong, and differed between runs."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    close(*both_ways("ring", "blockwise", "plain", "striped", dtype=jnp.bfloat16), 2**-7)
    found = {it.dtype: it.kind for it in wires("ring", 8, 4, dtypes=("u8", "f32"))}
    assert found == {"u8": "collective-permute"}


@pytest.mark.parametrize(("when", "ordered"), [(None, ""), (True, "striped"), (False, "striped")])
def test_the_largest_logits(when, ordered):
    arrays = batch()
    when = None if when is None else np.asarray(when)

    def largest(arrays):
        mask = Mask(arrays["position"], arrays["position"], arrays["segment"], arrays["segment"])
        context = Context(arrays["position"], arrays["segment"], np.arange(B), None, when)
        scores = Scores("blockwise", window=7, across=Across("ulysses", ordered))
        return jax.jit(lambda q, k: scores.largest(q, k, mask, context))(arrays["query"], arrays["key"])

    expected = largest(arrays)
    with on_mesh(mesh_of(), RULES):
        found = largest(reorder(arrays, 4, ordered) if ordered else arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def wires(strategy, heads, kv_heads, dtypes=("f32",)):
    """Returns the collectives of a forward pass that splits each row over four devices."""
    arrays, mesh = batch(heads, kv_heads), mesh_of(tensor=1)
    scores = Scores("blockwise", across=Across(strategy))
    mask = Mask(arrays["position"], arrays["position"], arrays["segment"], arrays["segment"])
    context = Context(arrays["position"], arrays["segment"], np.arange(B), None)
    at = NamedSharding(mesh, PartitionSpec("data", "context"))
    with on_mesh(mesh, RULES):
        run = jax.jit(lambda *operands: scores.attend(*operands, mask, context), in_shardings=(at,) * 3)
        compiled = run.lower(arrays["query"], arrays["key"], arrays["value"]).compile()
    return [it for it in analyze(compiled.as_text(), mesh).collectives if it.dtype in dtypes]


def test_what_a_forward_pass_sends():
    """Counts elements per device, for keys of width D and values of width V, without positions and segments."""
    n, bytes_each = 4, 4
    ring = wires("ring", 8, 4)
    assert {it.kind for it in ring} == {"collective-permute"}
    assert sum(it.bytes for it in ring) / bytes_each == (n - 1) / n * B * T * 4 * (D + V)
    gathered = wires("all_gather", 8, 4)
    assert {it.kind for it in gathered} == {"all-gather"}
    assert sum(it.bytes for it in gathered) / bytes_each == (n - 1) / n * B * T * 4 * (D + V)
    by_heads = wires("ulysses", 4, 4)
    assert {it.kind for it in by_heads} == {"all-to-all"}
    assert sum(it.bytes for it in by_heads) / bytes_each == (n - 1) / n**2 * B * T * 4 * 2 * (D + V)

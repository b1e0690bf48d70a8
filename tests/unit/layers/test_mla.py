"""Multi-head latent attention: against NumPy in float64, with a cache of latents, and with QK-Clip."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import drawn

from trainer.config.errors import UserError
from trainer.layers.cache import Cache
from trainer.layers.mla import LatentAttention
from trainer.layers.sown import MaxLogit, capture
from trainer.ops.rope import Rope, frequencies
from trainer.optim.qk_clip import scaled
from trainer.products.context import Context
from trainer.products.plain import product

WIDTH, HEADS, KV_RANK, NOPE, ROPE, VALUE = 12, 3, 10, 8, 4, 6
YARN = Rope(1, 10000, "yarn", factor=8.0, original_length=16, beta_fast=4.0, interleave=True)
MSCALE = 0.707
SEGMENTS = np.array([[1] * 4 + [2] * 5, [1] * 3 + [2] * 4 + [0] * 2])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 0, 0]])


def make(q_rank=5, **settings):
    sizes = {"q_rank": q_rank, "kv_rank": KV_RANK, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE}
    how = {"rope": YARN, "mscale": MSCALE, "norm_epsilon": 1e-5, "dtype": jnp.float32, "weight_dtype": jnp.float32}
    return drawn(lambda: LatentAttention(WIDTH, heads=HEADS, **(sizes | how | settings), rngs=nnx.Rngs(0)))


def tokens(length=9):
    return np.random.default_rng(1).normal(size=(2, length, WIDTH)).astype(np.float32)


def context(positions=POSITIONS, segments=SEGMENTS):
    return Context(positions.astype(np.int32), segments.astype(np.int32), np.arange(2, dtype=np.int32), None)


def run(layer):
    """Returns the layer's result for `tokens`, and the values it sows."""
    graph, state = nnx.split(layer)
    return jax.jit(lambda state: capture(nnx.merge(graph, state), (MaxLogit,))(tokens(), None, context()))(state)


def by_hand(layer, x):
    """The paper's formulas, one query at a time, with RoPE by complex numbers: returns the output and the largest
    logits [h]."""
    double = functools.partial(np.asarray, dtype=np.float64)
    weights = {name: double(leaf) for name, leaf in flat(nnx.state(layer, nnx.Param)).items()}

    def norm(latent, name):
        return latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}/scale"]

    def turned(part, row, t):
        pairs = (part[..., 0::2] + 1j * part[..., 1::2]) * np.exp(1j * POSITIONS[row, t] * frequencies(YARN, ROPE))
        return np.stack((pairs.real, pairs.imag), -1).reshape(part.shape)

    scale = (0.1 * MSCALE * math.log(8) + 1) ** 2 / math.sqrt(NOPE + ROPE)
    out, largest = np.zeros(x.shape), np.full(HEADS, -np.inf)
    for row, t in np.ndindex(*x.shape[:2]):
        hidden = double(x[row])
        if layer.q_rank:
            query = np.tensordot(norm(hidden[t] @ weights["wq_a/kernel"], "q_norm"), weights["wq_b/kernel"], 1)
        else:
            query = np.tensordot(hidden[t], weights["query/kernel"], 1)
        seen = [s for s in range(t + 1) if SEGMENTS[row, s] == SEGMENTS[row, t]]
        latents = hidden[seen] @ weights["wkv_a/kernel"]
        heads = np.einsum("sr,rhd->hsd", norm(latents[:, :KV_RANK], "kv_norm"), weights["wkv_b/kernel"])
        shared = np.stack([turned(latent[KV_RANK:], row, s) for latent, s in zip(latents, seen, strict=True)])
        logits = np.einsum("hd,hsd->hs", query[:, :NOPE], heads[..., :NOPE])
        logits = scale * (logits + turned(query[:, NOPE:], row, t) @ shared.T)
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        attended = np.einsum("hs,hsd->hd", probabilities, heads[..., NOPE:])
        out[row, t] = np.tensordot(attended, weights["out/kernel"], 2)
        if SEGMENTS[row, t]:
            largest = np.maximum(largest, logits.max(-1))
    return out, largest


def flat(state):
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.parametrize("q_rank", [0, 5])
def test_it_equals_numpy(q_rank):
    layer = make(q_rank)
    expected, largest = by_hand(layer, tokens())
    real = SEGMENTS != 0
    (out, _), sown = run(layer)
    np.testing.assert_allclose(out[real], expected[real], atol=2e-6)
    np.testing.assert_allclose(sown["MaxLogit"]["max_logit"], largest, rtol=1e-5)
    (blockwise, _), _ = run(make(q_rank, op="blockwise"))
    np.testing.assert_allclose(blockwise[real], out[real], atol=2e-6)


def test_halves_are_pairs_with_permuted_weights():
    """Hugging Face's other layout rotates (x[i], x[i + d / 2]) together; the columns are reordered accordingly."""
    pairs, halves = make(0), make(0, rope=YARN._replace(interleave=False))
    order = np.r_[0:ROPE:2, 1:ROPE:2]
    query, latents = np.asarray(pairs.query.kernel[...]), np.asarray(pairs.wkv_a.kernel[...])
    query = np.concatenate([query[..., :NOPE], query[..., NOPE + order]], axis=-1)
    latents = np.concatenate([latents[:, :KV_RANK], latents[:, KV_RANK + order]], axis=-1)
    halves.query.kernel.set_value(query)
    halves.wkv_a.kernel.set_value(latents)
    np.testing.assert_allclose(run(halves)[0][0], run(pairs)[0][0], atol=1e-6)


@pytest.mark.parametrize("how", ["absorbed", "whole"])
def test_a_cache_of_latents_gives_what_a_whole_row_gives(how):
    """With the plain product, queries are projected to the latents ("absorbed"). Another product needs each head's keys
    and values ("whole")."""
    layer = make()
    if how == "whole":
        layer.wkv_b.product = lambda *args: product(*args)
    length, first = 6, 3
    x = tokens(length)
    places = np.tile(np.arange(length), (2, 1))
    entries = jax.jit(lambda: jax.tree.map(lambda array: array[None], layer.init_cache(2, length + 1)))()
    assert sum(leaf.size for leaf in entries) == 2 * (length + 1) * (KV_RANK + ROPE)

    def call(cache, x, places):
        return layer(x, cache, context(places, np.ones(places.shape, int)))

    expected = jax.jit(call)(None, x, places)[0]
    out, cache = jax.jit(call)(Cache(entries, 0), x[:, :first], places[:, :first])
    parts, decode = [out], jax.jit(call)
    for t in range(first, length):
        out, cache = decode(Cache(cache.entries, 0, filled=True), x[:, t : t + 1], places[:, t : t + 1])
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=2e-6)
    if how == "absorbed":
        step = jax.make_jaxpr(call)(Cache(cache.entries, 0, filled=True), x[:, :1], places[:, :1])
        per_head = {(2, length + 1, HEADS, width) for width in (NOPE, VALUE, NOPE + VALUE)}
        assert not per_head & {eqn.outvars[0].aval.shape for eqn in step.eqns}


@pytest.mark.parametrize("q_rank", [0, 5])
def test_qk_clip_scales_each_heads_logits_and_leaves_the_shared_key(q_rank):
    layer = make(q_rank)
    eta = np.float32([1.0, 0.25, 0.6])
    graph, state = nnx.split(layer)
    before = nnx.to_pure_dict(state)
    after = jax.jit(lambda before: scaled(before, layer.logit_factors, eta))(before)
    before, after = jax.device_get((before, after))
    changed = {"/".join(path) for path, leaf in leaves(after) if (leaf != at(before, path)).any()}
    assert changed == {"wq_b/kernel" if q_rank else "query/kernel", "wkv_b/kernel"}
    np.testing.assert_array_equal(after["wkv_b"]["kernel"][..., NOPE:], before["wkv_b"]["kernel"][..., NOPE:])
    nnx.replace_by_pure_dict(state, after)
    (_, found), (_, expected) = run(nnx.merge(graph, state)), run(layer)
    # Every logit of head h is multiplied by eta_h, and therefore the largest logit is, too.
    np.testing.assert_allclose(
        found["MaxLogit"]["max_logit"], eta * np.asarray(expected["MaxLogit"]["max_logit"]), rtol=2e-6
    )
    with pytest.raises(UserError, match="soft cap"):
        make(q_rank, soft_cap=5.0).logit_factors(eta)


def leaves(tree):
    return [(tuple(key.key for key in path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def at(tree, path):
    return functools.reduce(lambda node, name: node[name], path, tree)

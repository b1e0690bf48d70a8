"""The stack of blocks computes the same function of the same tree, however the loop is compiled and rematerialized."""

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import assert_equal_bits

from trainer.backends.base import tree_mode
from trainer.config.capabilities.remat_tensors import PROJECTIONS
from trainer.layers.cache import Cache
from trainer.layers.dense import Dense
from trainer.layers.loop import Loop, cast_in_loop
from trainer.layers.mlp import MLP
from trainer.layers.norm import RMSNorm
from trainer.layers.remat import make_policy
from trainer.layers.run import run_modules
from trainer.layers.sown import Total, sow
from trainer.layers.stack import Stack, make_stack
from trainer.products import context

# One policy of each kind. tests/unit/layers/test_remat.py tests all policies.
POLICIES = ("full", "minimal", "minimal_offloaded")
LAYERS, WIDTH, ROWS, LENGTH = 3, 8, 2, 4
NAMES = ("activation_batch", "activation_length", "activation_embed")


class Context(NamedTuple):
    """A context with an additional field that the stack does not know."""

    scale: jax.Array
    rows: jax.Array
    key: jax.Array | None

    at = context.Context.at


class Other(nnx.Variable):
    """A sown type that nobody captures."""


class Block(nnx.Module):
    """A block with everything that a stack must pass through: parameters, a cache, context, a key and sown values."""

    def __init__(self, rngs):
        dtypes = {"dtype": jnp.float32, "weight_dtype": jnp.float32}
        self.norm = RMSNorm(WIDTH, epsilon=1e-5, **dtypes)
        self.mix = Dense([WIDTH], [WIDTH], ("embed", "embed"), rngs=rngs, **dtypes)
        self.mlp = MLP(WIDTH, 2 * WIDTH, ["silu", "linear"], dropout_rate=0.0, rngs=rngs, **dtypes)

    def __call__(self, x, cache, context):
        cache = None if cache is None else cache.replace(cache.read() + x.sum(axis=(1, 2)))
        x = x + context.scale * jnp.tanh(self.mix(x, NAMES))
        x = x + self.mlp(self.norm(x), context._replace(key=None))
        if context.key is not None:
            # A stand-in for dropout, which compiles slowly. It contains no product that the compiler could fuse with
            # the next layer's first sum in an unrolled loop.
            # next layer's first sum if the loop is unrolled.
            x = jnp.where(jax.random.bernoulli(context.key, 0.5), x, -x)
        sow(self, Total, "total", x.sum())
        sow(self, Other, "other", x.sum())
        return x, cache


@functools.cache
def blocks():
    with tree_mode():
        return jax.jit(lambda: make_stack(Stack("layers", (Block,), LAYERS), [Block], nnx.Rngs(0)))()


def inputs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    return x, np.zeros((LAYERS, ROWS), np.float32), np.float32(0.7), np.arange(ROWS)


def loop(context, types=()):
    return Loop(Stack("layers", (Block,), LAYERS), 0, context, types)


def step_of(scan, remat_policy, types=(Total,), *, keep=True):
    """Returns a function and its arguments. The function returns (x, cache, sown), without `sown` if not `keep`, and
    the gradients of a weighted sum of x with respect to the parameters and the input."""
    graphdef, params = nnx.split(blocks())
    x, cache, scale, row = inputs()
    weight = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    def run(params, x, key):
        def loss(params, x):
            stack = nnx.merge(graphdef, params)
            settings = {"scan": scan, "remat": make_policy(remat_policy, {})}
            results = run_modules(loop(Context(scale, row, key), types), stack, x, [cache], **settings)
            return jnp.sum(results[0] * weight), results

        grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return results if keep else results[:2], nnx.to_pure_dict(grads[0]), grads[1]

    return run, (params, x, jax.random.key(5))


@functools.cache
def outputs_and_gradients(scan, remat_policy, types=(Total,)):
    run, args = step_of(scan, remat_policy, types)
    # Without fusions, because fused code may round a recomputed product differently.
    with tree_mode():
        return jax.device_get(jax.jit(run, compiler_options={"xla_disable_hlo_passes": "fusion"})(*args))


def test_parameters_are_stacked_under_a_layers_axis_and_drawn_independently():
    params = nnx.to_pure_dict(nnx.state(blocks()), extract_fn=lambda variable: variable)
    kernel = params["mlp"]["wi_0"]["kernel"]
    assert kernel.shape == (LAYERS, WIDTH, 2 * WIDTH)
    assert kernel.get_metadata("out_sharding") == ("layers", "embed", "mlp")
    assert params["norm"]["scale"].get_metadata("out_sharding") == ("layers", "norm")
    assert len({np.asarray(layer).tobytes() for layer in kernel[...]}) == LAYERS


def test_the_stack_is_its_blocks_one_after_the_other():
    graphdef, params = nnx.split(blocks())
    x, cache, scale, row = inputs()
    caches, totals = [], []

    @jax.jit
    def apply(params, x, cache, key):
        return nnx.merge(graphdef, params)(x, cache, Context(scale, row, key))

    with tree_mode():
        for i in range(LAYERS):
            layer_key = jax.random.fold_in(jax.random.key(5), i)
            x, layer_cache = apply(jax.tree.map(lambda a, i=i: a[i], params), x, Cache(cache, i), layer_key)
            caches.append(layer_cache.read())
            totals.append(x.sum())
    (actual, (actual_cache,), sown), _, _ = outputs_and_gradients(True, "none")
    np.testing.assert_allclose(actual, x, atol=1e-5)
    np.testing.assert_allclose(actual_cache, jnp.stack(caches), atol=1e-5)
    np.testing.assert_allclose(sown["Total"]["layers/total"], jnp.stack(totals), atol=1e-4)


@pytest.mark.rest(covered_by="minimal_offloaded", cases=("full", "minimal"))
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat_policy", POLICIES)
def test_neither_recomputing_nor_the_loop_changes_a_bit(remat_policy, scan):
    assert_equal_bits(outputs_and_gradients(scan, remat_policy), outputs_and_gradients(True, "none"))


@pytest.mark.parametrize("scan", [True, False])
def test_sown_values_come_out_with_a_layers_axis(scan):
    (x, _, sown), _, _ = outputs_and_gradients(scan, "minimal_offloaded")
    assert list(sown) == ["Total"]
    assert list(sown["Total"]) == ["layers/total"]
    assert sown["Total"]["layers/total"].shape == (LAYERS,)
    np.testing.assert_allclose(sown["Total"]["layers/total"][-1], x.sum(), rtol=1e-5)


def test_values_are_sown_only_when_asked_for():
    def unrolled(types, keep):
        run, args = step_of(False, "none", types, keep=keep)
        with tree_mode():
            program = jax.jit(run).lower(*args)
        return program.as_text(), program.out_info

    text, (results, *_) = unrolled((), True)
    assert results[2] == {}
    assert text == unrolled((Total,), False)[0]


def test_sowing_for_nobody_leaves_no_trace():
    x, _, scale, row = inputs()

    def called():
        block = Block(nnx.Rngs(0))
        block(x, None, Context(scale, row, None))
        assert not hasattr(block, "total")

    with tree_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")  # flax deprecates sowing outside a capture, which would also store the value
        jax.eval_shape(called)


def test_a_policy_recomputes_what_it_says():
    """Counts products in the scanned step: 4 projections forward, twice as many backward, and the recomputed ones."""
    graphdef, params = nnx.split(blocks())
    x, _, scale, row = inputs()

    def products(policy):
        def loss(params):
            settings = {"scan": True, "remat": make_policy(policy, {})}
            stack = nnx.merge(graphdef, params)
            return jnp.sum(run_modules(loop(Context(scale, row, None)), stack, x, [None], **settings)[0])

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general")

    with tree_mode():
        counts = {policy: products(policy) for policy in ("none", "full", "minimal")}
    # full recomputes all products but the last, which nothing reads; minimal recomputes only mix, which has no name.
    assert counts == {"none": 12, "full": 15, "minimal": 13}


def test_every_projection_of_a_layer_has_a_name_that_minimal_keeps():
    graphdef, params = nnx.split(blocks())
    x, _, scale, row = inputs()

    def run(params):
        stack = nnx.merge(graphdef, params)
        return run_modules(loop(Context(scale, row, None)), stack, x, [None], scan=True, remat=None)[0]

    with tree_mode():
        text = str(jax.make_jaxpr(run)(params))
    found = {name for name in PROJECTIONS if f"name[name={name}]" in text}
    assert found == {"mlpwi_0", "mlpwi_1", "mlpwo"}


def test_weights_are_cast_inside_of_the_loop():
    """Casting the whole stack before the loop would need memory for a copy; see `cast_in_loop`."""
    stacked = {"kernel": jnp.full((3, 8, 8), -0.0), "scale": jnp.ones((3, 8))}

    def step(x, layer):
        index, weights = layer
        return x, cast_in_loop(weights, index, x.dtype)

    _, tied = jax.lax.scan(step, jnp.zeros(8, jnp.bfloat16), (jnp.arange(3), stacked))
    assert_equal_bits(tied, stacked)  # even the sign of zero is kept

    def operations(dtype):
        return str(jax.make_jaxpr(lambda w, i: cast_in_loop(w, i, jnp.dtype(dtype)))(stacked, 1))

    assert "layout_constraint" in operations("bfloat16")
    assert "layout_constraint" not in operations("float32")  # nothing is cast


class Keyed(nnx.Module):
    """Sows the key that it receives."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))

    def __call__(self, x, cache, context):
        sow(self, Total, "key", jax.random.key_data(context.key))
        return x, cache


@pytest.mark.parametrize("scan", [True, False])
def test_layers_are_numbered_through_all_stacks_so_that_no_two_share_a_key(scan):
    key, rngs, first = jax.random.key(5), nnx.Rngs(0), 0
    x, _, scale, row = inputs()
    found, weights = {}, []
    with tree_mode():
        for stack in (Stack("single", (Keyed,), 2), Stack("pairs", (Keyed, Keyed), 2)):
            module = make_stack(stack, stack.blocks, rngs)
            weights += jax.tree.leaves(nnx.state(module))
            settings = Loop(stack, first, Context(scale, row, key), (Total,))
            sown = run_modules(settings, module, x, [None] * len(stack.blocks), scan=scan, remat=None)[2]
            found |= {path: value.tolist() for path, value in sown["Total"].items()}
            first += stack.layers
    keys = [jax.random.key_data(jax.random.fold_in(key, layer)).tolist() for layer in range(6)]
    assert found == {
        "single/key": keys[:2],
        "pairs/layers_0/key": [keys[2], keys[4]],
        "pairs/layers_1/key": [keys[3], keys[5]],
    }
    assert len({layer.tobytes() for weight in weights for layer in np.asarray(weight)}) == 6

"""A pipelined stack computes the same as its layers in sequence, with the schedule in the module's docstring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config.capabilities.pipeline_keys import Pipeline
from trainer.layers import pipeline
from trainer.layers.loop import Loop
from trainer.layers.remat import make_policy
from trainer.layers.sown import Activation, Maximum, SownValue, Total
from trainer.layers.stack import Stack
from trainer.products.context import Context

LAYERS, ROWS, LENGTH, WIDTH = 8, 16, 2, 4
FIRST = 3  # index of the stack's first layer in the model


class Rows(SownValue):
    """The rows that a layer receives. It has no `combine`, like activations."""


class Key(SownValue):
    """A layer's key in every microbatch, on axis 1."""

    combine = staticmethod(lambda values, axis: values)


class Number(Total):
    """The number of the parameters that a layer receives."""


# (repeats, stages, layers per stage, microbatches, delay), and other fields. A result waits in the queue for M / S - 2
# iterations with a delay of 2, otherwise for M / S - 1.
PLANS = {
    "one repeat": Pipeline(1, 2, 4, 2),
    "one repeat, more microbatches": Pipeline(1, 4, 2, 8, scan_layers=True, remat_layers=True),
    "no queue": Pipeline(4, 2, 1, 2),
    "a queue of one": Pipeline(2, 2, 2, 4),
    "a queue of three": Pipeline(2, 4, 1, 16),
    "a layer per stage": Pipeline(1, 8, 1, 8, remat=False),
    "delayed, one repeat": Pipeline(1, 4, 2, 8, 2),
    "delayed, no queue": Pipeline(2, 4, 1, 8, 2),
    "delayed, a queue of two": Pipeline(4, 2, 1, 8, 2, remat=False, remat_layers=True),
    "per repeat, delayed": Pipeline(4, 2, 1, 4, 2, per_repeat=True),
    "per repeat, unrolled": Pipeline(2, 2, 2, 2, scan=False, per_repeat=True),
    "per repeat, one repeat": Pipeline(1, 2, 4, 2, per_repeat=True),
}
OTHERS_COVER_IT = pytest.mark.rest(
    covered_by="other plans",
    cases=(
        *("one repeat", "one repeat, more microbatches", "no queue", "a layer per stage", "delayed, one repeat"),
        *("delayed, no queue", "per repeat, one repeat"),
    ),
)


def layer(params, rest, x, cache, context):
    """Mixes the features of a token and its position. Sows values that reveal whether an iteration in a bubble is
    counted. The gradient at zeros is NaN, so no stage may start on zeros."""
    del rest
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = x + jnp.tanh(x @ params["weight"] + context.positions[..., None] * params["bias"])
    sown = {
        # Adds one per call.
        "Total": {"total": 1 + jnp.square(x - 5).sum()},
        "Maximum": {"maximum": (1 / (0.01 + jnp.square(x).mean((1, 2)))).max()},
        "Rows": {"rows": context.rows},
        "Number": {"number": params["number"]},
        "Key": {"key": jax.random.key_data(context.key)},
    }
    return (x, cache), sown


TYPES = (Total, Maximum, Activation, Rows, Number, Key)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    params = {
        "weight": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32),
        "bias": rng.normal(size=(LAYERS, WIDTH)).astype(np.float32),
        "number": np.arange(LAYERS, dtype=np.float32),
    }
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    positions = rng.integers(0, 3, (ROWS, LENGTH)).astype(np.int32)
    context = Context(jnp.asarray(positions), jnp.ones_like(positions), jnp.arange(ROWS), jax.random.key(5))
    return params, x, context


def weighed(x, totals):
    """Returns a number that depends on every entry of x and on every layer's total."""
    weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    return (x * weights).sum() + 0.01 * (totals.reshape(-1) * np.arange(1.0, LAYERS + 1, dtype=np.float32)).sum()


@functools.cache
def one_after_the_other():
    """Runs the layers in sequence on all rows. Returns the loss; x, totals, maxima and outputs; and the gradients."""

    def run(params, x):
        def one(x, params):
            (x, _), sown = layer(params, {}, x, None, inputs()[2])
            return x, (sown["Total"]["total"], sown["Maximum"]["maximum"], x)

        x, (totals, *others) = jax.lax.scan(one, x, params)
        return weighed(x, totals), (x, totals, *others)

    (loss, found), grads = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(*inputs()[:2])
    return jax.device_get((loss, found, grads))


def staged(plan, blocks=1, types=TYPES):
    """Returns a function of (params [layers, ...], x) that returns (x, sown)."""
    stack = Stack("layers", (layer,) * blocks, LAYERS // blocks, plan)
    policy = make_policy("full", {})

    def block(*args):
        result, sown = layer(*args)
        return result, {kind.__name__: sown.get(kind.__name__, {}) for kind in types}

    def run(params, x):
        def of_block(b):  # layer i runs block i mod blocks
            return jax.tree.map(lambda a: a[b::blocks].reshape(*plan.sizes, *a.shape[1:]), params)

        variables = [[of_block(b) for b in range(blocks)], [{}] * blocks]
        loop = Loop(stack, FIRST, inputs()[2], types)
        how = {"remat": policy, "remat_stage": policy, "cast_inside": False, "axes": lambda: [()] * 3 * blocks}
        return pipeline.run_pipeline(loop, [block] * blocks, variables, x, **how)

    return run


@functools.cache
def in_the_pipeline(plan):
    """Returns the loss; x and the sown values by layer and by (iteration, stage); and the gradients."""
    by_layer = pipeline._of_layers

    def loss(params, x):
        by_iteration = {}

        def seen(kind, value, plan):
            by_iteration[kind.__name__] = value
            return by_layer(kind, value, plan)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "_of_layers", seen)
            x, sown = staged(plan)(params, x)
        return weighed(x, sown["Total"]["layers/total"]), (x, sown, by_iteration)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*inputs()[:2]))


def assert_close(found, expected):
    assert np.linalg.norm(found - expected) <= 1e-6 * max(np.linalg.norm(expected), 1), np.abs(found - expected).max()


@OTHERS_COVER_IT
@pytest.mark.parametrize("name", PLANS)
def test_it_computes_what_layers_one_after_the_other_do(name):
    plan = PLANS[name]
    (_, (x, sown, _)), grads = in_the_pipeline(plan)
    _, (same_x, totals, maxima, outputs), same_grads = one_after_the_other()
    assert_close(x, same_x)
    jax.tree.map(assert_close, grads, same_grads)
    for kind, name, expected in (
        ("Total", "total", totals + plan.microbatches - 1),
        ("Maximum", "maximum", maxima),
        ("Activation", "output", outputs),
        ("Rows", "rows", np.tile(np.arange(ROWS), (LAYERS, 1))),
    ):
        value = sown[kind][f"layers/{name}"]
        assert value.shape == (*plan.sizes, *expected.shape[1:])
        assert_close(value.reshape(expected.shape), expected)


@OTHERS_COVER_IT
@pytest.mark.parametrize("name", PLANS)
def test_every_microbatch_has_the_keys_of_its_layers(name):
    plan = PLANS[name]
    (_, (_, sown, _)), _ = in_the_pipeline(plan)
    found = np.moveaxis(sown["Key"]["layers/key"], 1, 3).reshape(LAYERS, plan.microbatches, 2)
    for i in range(LAYERS):
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(5), FIRST + i))
        np.testing.assert_array_equal(found[i], np.tile(key, (plan.microbatches, 1)))


@OTHERS_COVER_IT
@pytest.mark.parametrize("name", PLANS)
def test_who_has_what_in_which_iteration(name):
    """In its pass r, microbatch m is in stage s in iteration r M + m + d s."""
    plan = PLANS[name]
    (_, (_, _, by_iteration)), _ = in_the_pipeline(plan)
    numbers, rows = by_iteration["Number"], by_iteration["Rows"]
    assert len(numbers) == plan.iterations
    # A microbatch takes a share of each device's equal part of the batch.
    each = np.arange(ROWS).reshape(plan.stages, -1, plan.microbatches // plan.stages)
    busy = np.zeros((plan.iterations, plan.stages), int)
    for repeat in range(plan.repeats):
        for microbatch in range(plan.microbatches):
            for stage in range(plan.stages):
                i = repeat * plan.microbatches + microbatch + plan.delay * stage
                first = (repeat * plan.stages + stage) * plan.layers
                assert numbers[i, stage].tolist() == list(range(first, first + plan.layers))
                of = each[microbatch * plan.stages // plan.microbatches, :, microbatch % each.shape[2]]
                np.testing.assert_array_equal(rows[i, stage], np.tile(of, (plan.layers, 1)))
                busy[i, stage] += 1
    assert busy.max() == 1
    assert plan.bubble == pytest.approx(1 - busy.mean())


def test_a_stage_has_whole_patterns():
    plan, types = Pipeline(2, 2, 1, 4), (Activation, Key)
    x, sown = jax.jit(staged(plan, 2, types))(*inputs()[:2])
    _, (same_x, _, _, outputs), _ = one_after_the_other()
    assert_close(np.asarray(x), same_x)
    for b in range(2):
        output = np.asarray(sown["Activation"][f"layers/layers_{b}/output"])
        assert_close(output.reshape(outputs[b::2].shape), outputs[b::2])
        found = np.moveaxis(sown["Key"][f"layers/layers_{b}/key"], 1, 3).reshape(-1, plan.microbatches, 2)
        keys = [jax.random.key_data(jax.random.fold_in(jax.random.key(5), FIRST + i)) for i in range(b, LAYERS, 2)]
        np.testing.assert_array_equal(found, np.repeat(np.stack(keys)[:, None], plan.microbatches, 1))

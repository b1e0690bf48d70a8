"""The native types are real: our steps equal their own update methods, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compiler import unoptimized
from flax import nnx
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, packed_batch, state_from

from trainer.backends.base import tree_mode
from trainer.backends.train_state import TrainStateNNX
from trainer.config.load import load
from trainer.ops.losses import cross_entropy
from trainer.training.build import build

STEPS = 10


@functools.cache
def trained(combination):
    """Returns the run, its native train states before and after the steps, and the canonical ones with the metrics."""
    run = build(load(arguments(combination, learning_rate=1e-2)).config, jax.devices()[:1])
    first = copied(run.codec.unpack(run.init()))
    start, state, metrics = state_from(run, first), state_from(run, first), []
    step = run.step.lower(*run.abstract_args()).compile()
    for i in range(STEPS):
        state, row = step(state, batch_of(run, i), ())
        metrics.append(run.computation.read(row, i))
    return run, start, state, (first, copied(run.codec.unpack(state)), metrics)


def batch_of(run, i):
    return packed_batch(run.config, run.rows, seed=i)


def mean_loss(logits, batch):
    real = batch["targets_segmentation"] != 0
    nll, _ = cross_entropy(logits, batch["targets"])
    total = jnp.sum(jnp.where(real, nll, 0))
    return total / jnp.maximum(jnp.sum(real, dtype=jnp.float32), 1)


FIELDS = ("inputs", "inputs_position", "inputs_segmentation", "row")


def native_step(run, state):
    """Runs a step with the update method of the native train state's library."""
    if isinstance(state, nnx.State):
        assert set(state.keys()) == {"model", "optimizer"}

        def step(state, batch):
            train_state = nnx.merge(nnx.graphdef(run.model.train_state_module(run.codec.tx)), state)
            assert isinstance(train_state, TrainStateNNX)
            graphdef, params = nnx.split(train_state.model)

            def loss(params):
                return mean_loss(nnx.merge(graphdef, params)(*(batch[name] for name in FIELDS)), batch)

            train_state.apply_gradients(jax.grad(loss)(params))
            return nnx.split(train_state)[1]

        return step

    def step(state, batch):
        def loss(params):
            return mean_loss(state.apply_fn({"params": params}, *(batch[name] for name in FIELDS)), batch)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    return step


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
@unoptimized()
def test_ten_steps_equal_the_librarys_own(combination):
    """They also equal the steps of the first combination, although each combination initializes, packs and compiles its
    train state in its own way."""
    run, state, ours, found = trained(combination)
    with tree_mode():
        step = jax.jit(native_step(run, state))
        for i in range(STEPS):
            state = step(state, batch_of(run, i))
    assert_equal_bits(state, ours)
    assert_equal_bits(found, trained(ALL_COMBINATIONS[0])[-1])
    first, last, metrics = found
    assert last.step == STEPS
    assert metrics[-1]["loss"] != metrics[0]["loss"]
    with pytest.raises(AssertionError):
        assert_equal_bits(first.params, last.params)

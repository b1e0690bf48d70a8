"""The native types are real: our steps equal their own update methods, bit for bit."""

import jax
import jax.numpy as jnp
import pytest
from compiler import EXACT
from flax import nnx
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, first_tree, packed_batch, state_from

from trainer.backends.base import tree_mode
from trainer.backends.train_state import TrainStateNNX
from trainer.config.load import load
from trainer.ops.losses import cross_entropy
from trainer.training.build import build

STEPS = 10


def runs(combination, **overrides):
    run = build(load(arguments(combination, learning_rate=1e-2, **overrides)).config, jax.devices()[:1])
    batches = [packed_batch(run.config, run.rows, seed=i) for i in range(STEPS)]
    tree = first_tree(run)
    ours, native = state_from(run, tree), state_from(run, tree)
    step = run.step.lower(*run.abstract_args()).compile(EXACT)
    for batch in batches:
        ours, _ = step(ours, batch, ())
    return run, native, ours, batches


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
def test_ten_steps_equal_the_librarys_own(combination):
    run, state, ours, batches = runs(combination)
    with tree_mode():
        step = jax.jit(native_step(run, state), compiler_options=EXACT)
        for batch in batches:
            state = step(state, batch)
    assert_equal_bits(state, ours)

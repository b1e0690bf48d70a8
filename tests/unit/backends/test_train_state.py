"""TrainStateNNX.apply_gradients does what `nnx.Optimizer.update` does, with optax's extra arguments.

integration/test_native_train_states.py shows that ten calls equal ten training steps, bit for bit.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from support import assert_equal_bits

from trainer.backends.base import tree_mode
from trainer.backends.train_state import TrainStateNNX, make_train_state


class Line(nnx.Module):
    def __init__(self):
        self.slope = nnx.Param(jnp.arange(1.0, 4.0))


def made(tx):
    module = Line()
    return TrainStateNNX(module, nnx.Optimizer(module, tx, wrt=nnx.Param))


def grads_of(module):
    return nnx.grad(lambda module: jnp.sum(module.slope[...] ** 3))(module)


@pytest.mark.parametrize("graph", [False, True])
def test_it_is_the_optimizers_update(graph):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        ours, plain = made(optax.adam(0.1)), made(optax.adam(0.1))
        for _ in range(3):
            assert ours.apply_gradients(grads_of(ours.model)) is None
            plain.optimizer.update(plain.model, grads_of(plain.model))
        assert ours.optimizer.step[...] == 3
        assert_equal_bits(nnx.state(ours), nnx.state(plain))


def scaled_by_an_argument():
    """Returns gradient descent with a rate and a direction that are arguments of each update."""

    def update(updates, state, params=None, *, rate, direction):
        assert jax.tree.structure(direction) == jax.tree.structure(updates) == jax.tree.structure(params)
        return jax.tree.map(lambda grad, sign: -rate * sign * grad, updates, direction), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize("make", [made, lambda tx: make_train_state(Line(), tx)], ids=["nnx.Optimizer", "ours"])
def test_keywords_reach_the_optimizer(make):
    with tree_mode():
        state = make(scaled_by_an_argument())
        before, grads = state.model.slope[...], grads_of(state.model)
        state.apply_gradients(grads, rate=0.5, direction=nnx.state(jax.tree.map(jnp.ones_like, grads)))
        assert_equal_bits(state.model.slope[...], before - 0.5 * grads.slope[...])
        with pytest.raises(TypeError, match="rate"):
            state.apply_gradients(grads)


def test_without_an_optimizer_it_says_so():
    with tree_mode():
        for state in (TrainStateNNX(Line()), TrainStateNNX(Line(), None)):
            assert set(nnx.state(state)) == {"model"}
            before = state.model.slope[...]
            with pytest.raises(
                RuntimeError, match=r"no optimizer; create it with one: TrainStateNNX\(model, nnx.Optimizer\("
            ):
                state.apply_gradients(grads_of(state.model))
            assert_equal_bits(state.model.slope[...], before)

"""The native train state of NNX."""

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx


class TrainStateNNX(nnx.Module):
    """A model and its `nnx.Optimizer`. `nnx.split` returns an `nnx.State` with top-level keys `model` and `optimizer`.

    A state for inference may have no optimizer; its split state then has only the key `model`.
    """

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer | None = None):
        self.model = model
        self.optimizer = optimizer

    def apply_gradients(self, grads: Any, **kwargs: Any) -> None:
        """Updates model and optimizer in place by one step.

        Args:
          grads: gradients of the model's parameters, as `nnx.grad` returns them: an `nnx.State`, or a module in tree
            mode.
          kwargs: extra arguments of the optax transformation, such as `value` of `optax.contrib.reduce_on_plateau`.
            An argument with the parameters' tree structure must be an `nnx.State`.

        Raises:
          RuntimeError: the state has no optimizer.
        """
        if self.optimizer is None:
            raise RuntimeError(
                "apply_gradients: this TrainStateNNX has no optimizer; create it with one: TrainStateNNX(model, "
                "nnx.Optimizer(model, tx, wrt=nnx.Param))"
            )
        self.optimizer.update(self.model, grads, **kwargs)


def make_train_state(model: nnx.Module, tx: optax.GradientTransformation) -> TrainStateNNX:
    """Returns a train state. Its optimizer state has optax's structure for a nested dict of the parameters."""
    optimizer: nnx.Optimizer = nnx.Optimizer(model, over_dicts(tx), wrt=nnx.Param)
    # Every combination counts steps in int32; nnx.Optimizer starts with uint32.
    optimizer.step = nnx.optimizer.OptState(jnp.zeros((), jnp.int32))
    return TrainStateNNX(model, optimizer)


def over_dicts(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `tx`, wrapped so that it receives nested dicts in place of `nnx.State`s. Extra arguments are converted,
    too.

    An optimizer's masks, labels and Muon dimensions are functions of the names and shapes of parameters. With nested
    dicts, neither these functions nor the summation order of a global norm depend on the module system.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params):
        return inner.init(_to_dict(params))

    def update(updates, state, params=None, **extra):
        extra = {name: _to_dict(value) for name, value in extra.items()}
        new, state = inner.update(_to_dict(updates), state, _to_dict(params), **extra)
        if isinstance(updates, nnx.State):
            new = nnx.State(new)
        return new, state

    return optax.GradientTransformationExtraArgs(init, update)


def _to_dict(tree):
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree

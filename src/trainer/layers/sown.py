"""Sown values: extra results of a layer.

The type of a value determines how the values of microbatches are combined into the value of the batch.

A layer sows with `sow`, which has no effect unless the caller captures the value's type. A stack returns each value
stacked over its layers, on axis 0.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# name of the type -> path of the value in the model, such as "decoder/layers/output_sum" -> value
Sown = Mapping[str, Mapping[str, jax.Array]]


_names: set[str] = set()  # names of all sown types


class SownValue(nnx.Variable):
    """The base class of sown types, including types that a user defines.

    NNX blocks call `sow`; Linen blocks sow into the collection that is named after the type.

    A type that a training step can return needs a static method `combine(values, axis=0)`, which combines the values
    of the microbatches, stacked on axis 0, into the value of the whole batch.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _names.add(cls.__name__)


class Total(SownValue):
    """A sum over the rows and tokens of a batch. Values of microbatches are added."""

    combine = staticmethod(jnp.sum)


class Maximum(SownValue):
    """A maximum over the rows and tokens of a batch. Values of microbatches are combined by their maximum."""

    combine = staticmethod(jnp.max)


class MaxLogit(SownValue):
    """The largest attention logit of each head, [heads]. Values of microbatches are combined by their maximum.

    A layer with the method `logit_factors` (`layers.clip`) sows it as "max_logit".
    """

    combine = staticmethod(jnp.max)


class RouterLoss(SownValue):
    """A router loss (`layers.moe`): a scalar, summed over a batch. `objectives.router` adds it to the loss."""

    combine = staticmethod(jnp.sum)


class RouterCount(SownValue):
    """A statistic of a router, summed over the tokens of a batch, for metrics; see `layers.moe`."""

    combine = staticmethod(jnp.sum)


class Activation(SownValue):
    """A tensor [b, t, ...] of the forward pass. It has no `combine`, so a training step cannot return it."""


class MtpHidden(SownValue):
    """Hidden states [b, t, e] of a multi-token prediction module (`models.mtp`), for the objective.

    The modules run only if this type is captured. Like `Activation`, this type has no `combine`.
    """


def type_names() -> frozenset[str]:
    """Returns the names of all sown types, including types that a user defines."""
    return frozenset(_names)


def check_captured(types: Iterable[type[nnx.Variable]], of_objective: Iterable[type[nnx.Variable]] = ()) -> None:
    """Checks the types that a training step captures.

    Args:
      types: the types whose values the step returns.
      of_objective: the types that only the objective reads (`objectives.Objective.captures`).

    Raises:
      ValueError: a type is not a SownValue, two types have the same name, or one of `types` has no `combine`.
    """
    types, both = list(types), list(dict.fromkeys((*types, *of_objective)))
    if other := [kind.__name__ for kind in both if not issubclass(kind, SownValue)]:
        raise ValueError(f"{', '.join(other)}: not a sown type; derive it from trainer.layers.sown.SownValue")
    if len({kind.__name__ for kind in both}) < len(both):
        raise ValueError(f"two sown types have the same name: {', '.join(map(str, both))}")
    if unable := [kind.__name__ for kind in types if not hasattr(kind, "combine")]:
        raise ValueError(f"{', '.join(unable)}: does not combine across microbatches; capture it in the objective")


def combined(types: Iterable[type[nnx.Variable]], sown: Sown) -> Sown:
    """Combines `sown`, values of `types` with a leading microbatch axis, into the values of the whole batch."""

    def one(kind: Any) -> dict[str, jax.Array]:
        return {path: kind.combine(value, axis=0) for path, value in sown[kind.__name__].items()}

    return {kind.__name__: one(kind) for kind in types}


def captures(module: nnx.Module, variable_type: type[nnx.Variable]) -> bool:
    """Returns whether the caller captures values of `variable_type`. If not, the module need not compute them."""
    # nnx.capture sets __captures__ on the modules it captures; flax warns about a sow in any other module.
    return any(type(captured) is variable_type for captured in getattr(module, "__captures__", ()))


def sow(module: nnx.Module, variable_type: type[nnx.Variable], name: str, value: jax.Array) -> None:
    """Makes `value` an extra result of `module`, replacing any earlier value with the same name."""
    if captures(module, variable_type):
        module.sow(variable_type, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def with_output(sown: Sown, types: tuple[type[nnx.Variable], ...], x: jax.Array) -> Sown:
    """Returns `sown`, the sown values of a block, with the block's result `x` added if activations are captured."""
    name = Activation.__name__
    return {**sown, name: {**sown.get(name, {}), "output": x}} if Activation in types else sown


def capture(
    module: nnx.Module, types: tuple[type[nnx.Variable], ...], method: str = "__call__"
) -> Callable[..., tuple[Any, Sown]]:
    """Returns a function that runs `module.method` and returns its result and the sown values of `types`."""

    def call(*args: Any, **given: Any) -> tuple[Any, Sown]:
        if not types:
            return getattr(module, method)(*args, **given), {}
        result, *states = nnx.capture(getattr(module, method), *types)(*args, **given)
        return result, {t.__name__: _flatten(state) for t, state in zip(types, states, strict=True)}

    return call


def _flatten(state: nnx.State) -> dict[str, jax.Array]:
    return {"/".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.as_pure(state))}

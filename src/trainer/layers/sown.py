"""Extra results of a layer: sown values. The type of a value says how it combines across microbatches.

A layer sows with `sow`, which has no effect unless the caller captures that type. A stack returns each value with the
layers on axis 0.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# name of the type -> path of the value in the model, such as "decoder/layers/output_sum" -> value
Sown = Mapping[str, Mapping[str, jax.Array]]


_names: set[str] = set()  # of all sown types


class SownValue(nnx.Variable):
    """The base of all sown types, also of users' own. NNX blocks sow with `sow`, Linen blocks into the collection
    with the name of the type.

    A type that a training step can return has a static method `combine(values, axis=0)`, which joins the values of
    microbatches, on axis 0, to that of the whole batch.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _names.add(cls.__name__)


class Total(SownValue):
    """A sum over the rows and tokens of a batch: the values of microbatches add up."""

    combine = staticmethod(jnp.sum)


class Maximum(SownValue):
    """A maximum over the rows and tokens of a batch: the largest value of all microbatches."""

    combine = staticmethod(jnp.max)


class MaxLogit(SownValue):
    """The largest attention logit of each head, [heads], that a layer with `logit_factors` (`layers.clip`) sows as
    "max_logit": the largest of all microbatches."""

    combine = staticmethod(jnp.max)


class RouterLoss(SownValue):
    """A sum over the rows or tokens of a batch of a loss of a router (`layers.moe`), a scalar, which the objective
    adds to its own (`objectives.router`)."""

    combine = staticmethod(jnp.sum)


class RouterCount(SownValue):
    """A sum over the tokens of a batch that says how a router works, for metrics: see `layers.moe`."""

    combine = staticmethod(jnp.sum)


class Activation(SownValue):
    """A tensor [b, t, ...] of the forward pass. It has no `combine`, so a training step cannot return it."""


class MtpHidden(SownValue):
    """Hidden states [b, t, e] of a module of multi-token prediction (`models.mtp`), which the objective needs. The
    modules run only where this type is captured. It has no `combine`, either."""


def type_names() -> frozenset[str]:
    """The names of all sown types, a user's too."""
    return frozenset(_names)


def check_captured(types: Iterable[type[nnx.Variable]], of_objective: Iterable[type[nnx.Variable]] = ()) -> None:
    """Checks the types that a training step captures.

    Args:
      types: those whose values it returns.
      of_objective: those that only the objective reads (`objectives.Objective.captures`).

    Raises:
      ValueError: a type is no SownValue, two types have the same name, or values of one of `types` do not combine
        across microbatches.
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
    """Whether the caller captures values of that type: otherwise a module need not compute them."""
    # nnx.capture sets __captures__ on the modules it captures; flax warns about a sow without it.
    return any(type(captured) is variable_type for captured in getattr(module, "__captures__", ()))


def sow(module: nnx.Module, variable_type: type[nnx.Variable], name: str, value: jax.Array) -> None:
    """Make `value` an extra result of `module`, which replaces an earlier one of the same name."""
    if captures(module, variable_type):
        module.sow(variable_type, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def with_output(sown: Sown, types: tuple[type[nnx.Variable], ...], x: jax.Array) -> Sown:
    """`sown` of a block and, if activations are captured, its result `x`."""
    name = Activation.__name__
    return {**sown, name: {**sown.get(name, {}), "output": x}} if Activation in types else sown


def capture(
    module: nnx.Module, types: tuple[type[nnx.Variable], ...], method: str = "__call__"
) -> Callable[..., tuple[Any, Sown]]:
    """`module.method`, which returns its result and the values of `types` that it sowed."""

    def call(*args: Any) -> tuple[Any, Sown]:
        if not types:
            return getattr(module, method)(*args), {}
        result, *states = nnx.capture(getattr(module, method), *types)(*args)
        return result, {t.__name__: _flatten(state) for t, state in zip(types, states, strict=True)}

    return call


def _flatten(state: nnx.State) -> dict[str, jax.Array]:
    return {"/".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.as_pure(state))}

"""Extra results of a layer: sown values, each of a type that names how they combine.

A layer sows with `sow`; nothing happens unless the caller captures that type. A stack of layers gives back each value
with the layers axis first.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

# name of the type -> path of the value in the model, such as "decoder/layers/output_sum" -> value
Sown = Mapping[str, Mapping[str, jax.Array]]


class Total(nnx.Variable):
    """A sum over the rows and tokens of a (micro)batch: sums of several batches add up."""


class Activation(nnx.Variable):
    """A tensor [b, t, ...] of the forward pass, to compare two programs by. Training never captures it."""


# What a training step captures where it records statistics.
TYPES: tuple[type[nnx.Variable], ...] = (Total,)


def sow(module: nnx.Module, variable_type: type[nnx.Variable], name: str, value: jax.Array) -> None:
    """Leave `value` as an extra result of `module`, in place of an earlier one of the same name."""
    # nnx.capture marks the modules that it watches with __captures__; flax warns of a sow without one.
    if any(type(captured) is variable_type for captured in getattr(module, "__captures__", ())):
        module.sow(variable_type, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def with_output(sown: Sown, types: tuple[type[nnx.Variable], ...], x: jax.Array) -> Sown:
    """`sown` of a block and, where activations are captured, its result `x`, whoever wrote the block."""
    name = Activation.__name__
    return {**sown, name: {**sown.get(name, {}), "output": x}} if Activation in types else sown


def capture(
    module: nnx.Module, types: tuple[type[nnx.Variable], ...], method: str = "__call__"
) -> Callable[..., tuple[Any, Sown]]:
    """`module.method`, giving its result and what was sown of `types` while it ran."""

    def call(*args: Any) -> tuple[Any, Sown]:
        if not types:
            return getattr(module, method)(*args), {}
        result, *states = nnx.capture(getattr(module, method), *types)(*args)
        return result, {t.__name__: _flatten(state) for t, state in zip(types, states, strict=True)}

    return call


def _flatten(state: nnx.State) -> dict[str, jax.Array]:
    return {"/".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.as_pure(state))}

"""Extra results of a layer: sown values, each of a type that names how they combine.

A layer sows with `self.sow(Type, name, value, **LATEST)`; nothing happens unless the caller asked for that type. A stack of
layers gives back each value with the layers axis first.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

# name of the type -> path of the value in the model, such as "decoder/layers/output_sum" -> value
Sown = Mapping[str, Mapping[str, jax.Array]]

# A module is called once in a forward pass, so a value replaces what was there and needs no tuple around it.
LATEST: Mapping[str, Any] = {"reduce_fn": lambda _, value: value, "init_fn": lambda: None}


class Total(nnx.Variable):
    """A sum over the rows and tokens of a (micro)batch: sums of several batches add up."""


TYPES: tuple[type[nnx.Variable], ...] = (Total,)


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

"""NNX modules inside Linen."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen, nnx
from flax.nnx import bridge

from trainer.layers.param import unnamed
from trainer.layers.sown import Sown, capture
from trainer.sharding import Axes


def to_linen(make: Callable[..., nnx.Module], *args: Any, **fields: Any) -> linen.Module:
    """Returns the NNX module `make(*args, rngs=...)` as a Linen module with the same parameter names and axes."""
    return _ToLinen(make, args=args, metadata_fn=_box, **fields)


class _ToLinen(bridge.ToLinen):
    @linen.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # A parameter that is a pytree causes this warning: in Linen, its arrays look like separate parameters.
            warnings.filterwarnings("ignore", "Found unknown module paths")
            return super().__call__(*args, **kwargs)


def capturing(types: tuple[type[nnx.Variable], ...], method: str = "__call__") -> Callable[..., tuple[Any, Sown]]:
    """Returns a function for `nnx_method` of `ToLinen`: it returns `method`'s result and the sown values of `types`."""
    return lambda module, *args, **given: capture(module, types, method)(*args, **given)


def is_box(x: Any) -> bool:
    """Returns whether `x` is a box: a parameter with its logical axis names."""
    return isinstance(x, linen.Partitioned)  # also true for LogicallyPartitioned


def unboxed(parameter: Any, leading: Sequence[str] = ()) -> tuple[Any, Axes]:
    """Returns a parameter's value and its logical axis names. `leading`: see `layers.param.unnamed`."""
    if is_box(parameter):
        return parameter.value, Axes(parameter.names)
    return parameter, Axes(unnamed(parameter.ndim, leading))


def _box(variable: nnx.Variable) -> Any:
    names = variable.get_metadata().get("out_sharding")
    value = variable.get_value()
    return linen.LogicallyPartitioned(value, names=tuple(names)) if names else value

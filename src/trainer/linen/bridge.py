"""NNX modules inside Linen."""

from collections.abc import Callable
from typing import Any

from flax import linen, nnx
from flax.nnx import bridge

from trainer.layers.sown import Sown, capture


def to_linen(make: Callable[..., nnx.Module], *args: Any, **fields: Any) -> linen.Module:
    """The NNX module `make(*args, rngs=...)` as a Linen module with the same parameter names and logical axes."""
    return bridge.ToLinen(make, args=args, metadata_fn=_box, **fields)


def capturing(types: tuple[type[nnx.Variable], ...], method: str = "__call__") -> Callable[..., tuple[Any, Sown]]:
    """A method for `ToLinen`'s nnx_method: runs `method` and also returns what was sown of `types`."""
    return lambda module, *args: capture(module, types, method)(*args)


def _box(variable: nnx.Variable) -> Any:
    names = variable.get_metadata().get("out_sharding")
    value = variable.get_value()
    return linen.LogicallyPartitioned(value, names=tuple(names)) if names else value

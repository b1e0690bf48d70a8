"""Parameters and buffers."""

from collections.abc import Sequence
from typing import Any

from flax import nnx


def param(value: Any, names: Sequence[str | None]) -> nnx.Param:
    """Returns a parameter whose axes have the logical `names`, which `sharding/` reads. It needs no mesh.

    `value` is an array, or a pytree of its parts (`sharding.axes_of_parts`).
    """
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)


def unnamed(ndim: int, leading: Sequence[str] = ()) -> tuple[str | None, ...]:
    """Returns the logical names of a parameter that has none, which occurs only in a user's block.

    `leading`: the leading axes of the stack to which it belongs.
    """
    return (*leading, *[None] * (ndim - len(leading)))


REST = "rest"  # the name of buffers in a TrainTree, and of their collection in Linen


def buffer(value: Any, names: Sequence[str | None]) -> "Buffer":
    """Returns a buffer whose axes have logical `names`, as in `param`."""
    return Buffer(value, out_sharding=tuple(names), eager_sharding=False)


@nnx.register_variable_name(REST)
class Buffer(nnx.Variable):
    """State without gradients that the forward pass reads, such as a router's bias. Update rules can change it."""

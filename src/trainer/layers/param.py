"""Parameters and buffers."""

from collections.abc import Sequence

import jax
from flax import nnx

LAYERS = "layers"  # the logical axis along which a stack's layers lie, the first of their parameters


def param(value: jax.Array, names: Sequence[str | None]) -> nnx.Param:
    """A parameter whose axes have the logical `names`, which `sharding/` reads. It needs no mesh."""
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)


def unnamed(ndim: int, stacked: bool) -> tuple[str | None, ...]:
    """The logical names of a parameter without names, which only a user's block has. `stacked`: it is in a
    stack, where layers are on the first axis."""
    return (LAYERS, *[None] * (ndim - 1)) if stacked else (None,) * ndim


REST = "rest"  # the name of buffers in a TrainTree, and of their collection in Linen


@nnx.register_variable_name(REST)
class Buffer(nnx.Variable):
    """State without gradients that the forward pass reads, such as a router's bias. Update rules can change it."""

"""Parameters and buffers."""

from collections.abc import Sequence

import jax
from flax import nnx


def param(value: jax.Array, names: Sequence[str | None]) -> nnx.Param:
    """A parameter whose axes have the logical `names`, which `sharding/` reads. It needs no mesh."""
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)


REST = "rest"  # the name of buffers in a TrainTree, and of their collection in Linen


@nnx.register_variable_name(REST)
class Buffer(nnx.Variable):
    """State without gradients that the forward pass reads, such as a router's bias. Update rules can change it."""

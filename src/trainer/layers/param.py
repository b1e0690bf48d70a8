"""Parameters and buffers."""

from collections.abc import Sequence

import jax
from flax import nnx


def param(value: jax.Array, names: Sequence[str | None]) -> nnx.Param:
    """A parameter whose axes are called `names`. The names are for `sharding/` to read; making one needs no mesh."""
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)


REST = "rest"  # where buffers lie: in a TrainTree, and the collection of Linen


@nnx.register_variable_name(REST)
class Buffer(nnx.Variable):
    """State that the forward pass reads and no gradient reaches, such as a router's bias. Update rules change it."""

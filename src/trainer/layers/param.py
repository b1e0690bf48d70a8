"""Parameters."""

from collections.abc import Sequence

import jax
from flax import nnx


def param(value: jax.Array, names: Sequence[str | None]) -> nnx.Param:
    """A parameter whose axes are called `names`. The names are for `sharding/` to read; making one needs no mesh."""
    return nnx.Param(value, out_sharding=tuple(names), eager_sharding=False)

"""Checks sharding_tolerance, the allowed share of parameters that are replicated although the mesh could shard them."""

import math
from typing import Any

import jax

from trainer.config.capabilities.lora_keys import ADAPTER
from trainer.config.errors import UserError
from trainer.sharding import axes_of
from trainer.state.zero1 import DATA

SHOWN = 5  # how many of the largest parameters the message lists
# The mesh axes that replicate parameters by design. The axis stage replicates the parameters outside of a pipeline.
_COPIES = (DATA, "diloco", "stage")


def check_tolerance(tensors: Any, abstract: Any, shardings: Any, tolerance: float) -> None:
    """Checks that no mesh axis replicates more than the share `tolerance` of the parameters.

    The mesh axes data, diloco and stage, and axes of size 1, are ignored. A parameter does not count if the mesh axis
    divides none of its dimensions. Low-rank adapters do not count either: they are small, and have only the input or
    the output axis of their matrix.

    Args:
      tensors, abstract, shardings: trees with equal structure; see `table.rows`.

    Raises:
      UserError: an axis exceeds `tolerance`; the message names the axis, the share, and the largest parameters.
    """
    rows = list(zip(*map(jax.tree.leaves, (tensors, abstract, shardings)), strict=True))
    params = [
        (t, leaf.shape, sharding)
        for t, leaf, sharding in rows
        if t.path[0] == "params" and not ADAPTER.search("/".join(t.path))
    ]
    total = sum(math.prod(shape) for _, shape, _ in params)
    problems = []
    for axis, size in params[0][2].mesh.shape.items():
        replicated = [(t, shape) for t, shape, sharding in params if size > 1 and _could_split(axis, shape, sharding)]
        share = sum(math.prod(shape) for _, shape in replicated) / total
        if axis in _COPIES or share <= tolerance:
            continue
        largest = sorted(replicated, key=lambda row: -math.prod(row[1]))[:SHOWN]
        listed = ", ".join(f"{t.name} [{', '.join(map(str, t.axes))}] {list(shape)}" for t, shape in largest)
        problems.append(
            f"mesh axis {axis} leaves {share:.1%} of the parameters replicated, more than "
            f"sharding_tolerance={tolerance:g}; the largest: {listed}. "
            f"Give one of their axes a rule with {axis}, or set the size of {axis} to 1"
        )
    if problems:
        raise UserError("\n  ".join(problems))


def _could_split(axis: str, shape: tuple[int, ...], sharding: Any) -> bool:
    if any(axis in axes_of(entry) for entry in sharding.spec):
        return False
    return any(size % sharding.mesh.shape[axis] == 0 for size in sharding.shard_shape(shape))

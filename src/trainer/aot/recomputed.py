"""What the backward pass of a traced step computes again, and the bytes that it would take to save it instead."""

import collections
import math
from typing import Any

from jax.extend.core import jaxprs_in_params
from jax.extend.core.primitives import name_p, remat_p, scan_p, sharding_constraint_p


def recomputed(jaxpr: Any, platform: str) -> dict[str, int]:
    """Returns the named tensors that checkpointed blocks compute again for their backward pass, with the bytes on one
    device that all of them would take if the forward pass saved them.

    In the program of a gradient, what a block computes again is in a `remat2` equation, and the loop over layers
    that contains it runs in reverse. Each of its turns reads one layer's tensors. The loop over microbatches does not
    run in reverse: one microbatch's tensors live at a time. Tensors that the backward pass does not read, or that the
    policy saves, are not in the equation.

    A tensor is divided over devices as the last constraint on an array of its shape in its block says. Without one, it
    counts as divided as little as any constrained array of the block. In a shard_map shapes are those of a device.

    Args:
      jaxpr: of the step, as `jit(...).trace(...)` returns it.
      platform: of the devices. A TPU fills the last axis up to a multiple of 128 entries.
    """
    found: dict[str, int] = collections.defaultdict(int)
    _add(jaxpr.jaxpr, found, 128 if platform == "tpu" else 1, times=1, again=False, local=False)
    return dict(found)


def _add(jaxpr: Any, found: dict[str, int], lanes: int, times: int, again: bool, local: bool) -> None:
    shards: dict[tuple[int, ...], tuple[int, ...]] = {}
    loose = []
    for equation in jaxpr.eqns:
        kind, params = equation.primitive, equation.params
        if kind is sharding_constraint_p:
            shape = equation.outvars[0].aval.shape
            shards[shape] = params["sharding"].shard_shape(shape)
        elif kind is name_p and again:
            array = equation.outvars[0].aval
            here = array.shape if local else shards.get(array.shape)
            size = times * array.dtype.itemsize * _entries(here or array.shape, lanes)
            if here is None:
                loose.append((params["name"], size))
            else:
                found[params["name"]] += size
        for inner in jaxprs_in_params(params):
            turns = params["length"] if kind is scan_p and (again or params["reverse"]) else 1
            backward = again or (kind is remat_p and params["differentiated"])
            _add(inner, found, lanes, times * turns, backward, local or kind.name == "shard_map")
    parts = min((math.prod(shape) // math.prod(shard) for shape, shard in shards.items()), default=1)
    for name, size in loose:
        found[name] += size // parts


def _entries(shape: tuple[int, ...], lanes: int) -> int:
    return math.prod(shape[:-1]) * -(-shape[-1] // lanes) * lanes if shape else 1

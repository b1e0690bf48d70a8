"""The tensors that the backward pass of a traced step recomputes, and the bytes needed to save them instead."""

import collections
import math
from typing import Any

from jax.extend.core import jaxprs_in_params
from jax.extend.core.primitives import name_p, remat_p, scan_p, sharding_constraint_p


def recomputed(jaxpr: Any, platform: str) -> dict[str, int]:
    """Returns the tensors with a `checkpoint_name` that checkpointed blocks recompute in the backward pass: a dict from
    each name to the bytes per device that the tensors of this name would take if the forward pass saved them.

    In a gradient's jaxpr, a `remat2` equation contains the recomputation of a block, restricted to the tensors that the
    backward pass reads and the policy does not save. This equation is inside the loop over layers, which runs in
    reverse: a tensor counts once per iteration, because it would be saved for every layer. The loop over microbatches
    runs forward: a tensor counts once, because only one microbatch's tensors are live at a time.

    A tensor is assumed to have the sharding of the nearest preceding array of the same shape that has a sharding
    constraint in the same block. If there is no such array, the tensor is assumed to have the smallest number of shards
    that a constrained array of the block has. In a shard_map, shapes are already per device.

    Args:
      jaxpr: the jaxpr of the step, as `jit(...).trace(...)` returns it.
      platform: the platform of the devices. A TPU pads the last axis to a multiple of 128 entries.
    """
    found: dict[str, int] = collections.defaultdict(int)
    _add(jaxpr.jaxpr, found, 128 if platform == "tpu" else 1, times=1, again=False, local=False)
    return dict(found)


def _add(jaxpr: Any, found: dict[str, int], lanes: int, times: int, again: bool, local: bool) -> None:
    shards: dict[tuple[int, ...], tuple[int, ...]] = {}
    loose = []
    for equation in jaxpr.eqns:
        kind, params = equation.primitive, equation.params
        if kind is sharding_constraint_p and not local:
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

"""Converts train states of a pipeline between two forms: by stage, and by layer as in checkpoints.

Without a pipeline, the forms are the same, and nothing is converted. Leaves are converted one by one. Layers move
between devices if the pipeline has more than one repeat.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from trainer.config.capabilities.pipeline_keys import Pipeline, stages
from trainer.config.keys import Config
from trainer.models.families import stacks
from trainer.models.stages import Division, divided, division, joined
from trainer.sharding import axes_of, entry

T = TypeVar("T")

_HOST = "pinned_host"


def abstract_layers(config: Config, abstract: T) -> T:
    """Converts a canonical train state of ShapeDtypeStructs, with or without shardings, to the form by layer."""
    return _in_layers(config, abstract, _abstract)


def in_layers(config: Config, tree: T) -> T:
    """Converts a canonical train state of arrays to the form by layer. The new arrays are in host memory if the devices
    have pinned host memory, so that at most one leaf at a time is on the device in both forms."""
    return _in_layers(config, tree, _joined)


def in_stages(config: Config, tree: T, abstract: T) -> T:
    """Inverts `in_layers`. The result has the shardings of `abstract`. Deletes the arrays of `tree` that it
    converts."""
    found = _division(config)
    if found is None:
        return tree
    return _by_island(
        lambda before, *trees: found.to_stages(trees[0], _divide(found, before), trees[1]), tree, abstract
    )


def _in_layers(config: Config, tree: T, join: Callable[..., Any]) -> T:
    found = _division(config)
    if found is None:
        return tree
    return _by_island(lambda before, part: found.to_layers(part, functools.partial(join, found, before)), tree)


def _division(config: Config) -> Division | None:
    return division(stacks(config)) if stages(config) > 1 else None


def _by_island(fn: Callable[..., Any], *trees: Any) -> Any:
    """Returns `fn(0, *trees)`. For DiLoCo, returns a state that consists of `fn(0, ...)` of the outer states and `fn(1,
    ...)` of the islands' states. The first argument of `fn` is the number of axes before the layer axes."""
    if not hasattr(trees[0], "inner_state"):
        return fn(0, *trees)
    outer = fn(0, *(tree._replace(inner_state=None) for tree in trees))
    return outer._replace(inner_state=fn(1, *(tree.inner_state for tree in trees)))


def _joined(found: Division, before: int, *parts: jax.Array) -> jax.Array:
    at = _abstract(found, before, *parts).sharding
    whole = _joining(found.plan, before, at)(*parts)
    device = next(iter(at.device_set))
    if device.platform != "cpu" and _HOST in {memory.kind for memory in device.addressable_memories()}:
        whole = jax.block_until_ready(jax.device_put(whole, at.with_memory_kind(_HOST)))
    return whole


@functools.cache
def _joining(plan: Pipeline, before: int, at: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(joined, plan, before=before), out_shardings=at)


def _divide(found: Division, before: int) -> Callable[..., tuple[jax.Array, Any]]:
    def divide(whole: jax.Array, *like: jax.ShapeDtypeStruct) -> tuple[jax.Array, Any]:
        parts = jax.block_until_ready(_dividing(found.plan, before, tuple(leaf.sharding for leaf in like))(whole))
        whole.delete()
        return parts if len(like) > 1 else (*parts, None)

    return divide


@functools.cache
def _dividing(plan: Pipeline, before: int, at: tuple[NamedSharding, ...]) -> Callable[..., tuple[Any, ...]]:
    return jax.jit(lambda whole: divided(plan, whole, before)[: len(at)], out_shardings=at)


def _abstract(found: Division, before: int, *parts: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and the sharding of a parameter in the form by layer. A mesh axis that does not divide the
    number of layers shards the parameter's next axis that it does divide, so that a device stores no more than in the
    form by stage."""
    shape = jax.eval_shape(functools.partial(joined, found.plan, before=before), *parts)
    at = getattr(parts[0], "sharding", None)
    if at is None:
        return shape
    entries = [axes_of(part) for part in (*at.spec, *[None] * (parts[0].ndim - len(at.spec)))]
    end = before + len(found.inside.sizes)
    stacked = [axis for axes in entries[before:end] for axis in axes]
    entries[before:end] = [()]
    for axis in stacked:
        sizes = (math.prod(at.mesh.shape[name] for name in (*axes, axis)) for axes in entries[before:])
        fits = (i for i, size in enumerate(sizes, before) if shape.shape[i] % size == 0)
        if (i := next(fits, None)) is not None:
            entries[i] = (*entries[i], axis)
    sharding = NamedSharding(at.mesh, PartitionSpec(*map(entry, entries)), memory_kind=at.memory_kind)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

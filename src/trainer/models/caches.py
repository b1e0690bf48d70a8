"""The caches of all layers of a model, which its blocks make."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config import Config
from trainer.layers.cache import Cache
from trainer.layers.stack import MakeBlock
from trainer.models.families import block_class, blocks, stacks
from trainer.sharding import Axes

PLACES = "activation_kv_length"  # the axis of a cache with a place for each position


def init_cache(config: Config, rows: int, length: int) -> Cache:
    """Returns empty caches for all layers, for `rows` rows of up to `length` positions."""

    def empty(block: Any, count: int) -> Any:
        one = block.init_cache(rows, length)
        return jax.tree.map(lambda array: jnp.broadcast_to(array, (count, *array.shape)), one)

    return Cache(_of_blocks(config, empty))


def cache_axes(config: Config) -> Any:
    """Returns the logical axes of the arrays of `init_cache`: an `Axes` at each leaf of its entries.

    A block names those of its own with `cache_axes()`. Without it, only the rows have a name, and the positions: the
    second axis is `PLACES` if its size depends on the length.
    """

    def named(block: Any, count: int) -> Any:
        if hasattr(block, "cache_axes"):
            axes = block.cache_axes()
        else:
            made, longer = (jax.eval_shape(functools.partial(block.init_cache, 1, length)) for length in (1, 2))
            axes = jax.tree.map(_cache_names, made, longer)
        return jax.tree.map(lambda names: Axes((None, *names)), axes, is_leaf=lambda it: isinstance(it, Axes))

    return _of_blocks(config, named)


def _cache_names(array: jax.ShapeDtypeStruct, longer: jax.ShapeDtypeStruct) -> Axes:
    after_rows: list[str | None] = [None] * (array.ndim - 1)
    if array.shape[1:2] != longer.shape[1:2]:
        after_rows[0] = PLACES
    return Axes(("activation_batch", *after_rows))


def _of_blocks(config: Config, value: Callable[[Any, int], Any]) -> dict[str, list[Any]]:
    """`value(block, count)` of each stack's blocks, which are modules of shapes."""

    def shapes(block: MakeBlock) -> Any:
        return nnx.eval_shape(lambda: block(config, nnx.Rngs(0)))

    return {stack.name: [value(shapes(block), stack.count) for block in stack.blocks] for stack in stacks(config)}


def takes_cache(config: Config) -> bool:
    """Returns whether every block makes a cache, so that one can sample from the model. Linen blocks make none."""
    classes = map(block_class, blocks(stacks(config)))
    return all(issubclass(made, nnx.Module) and hasattr(made, "init_cache") for made in classes)

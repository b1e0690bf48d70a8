"""The caches of all layers of a model, made by the model's blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config.keys import Config
from trainer.layers.cache import Cache, Layers
from trainer.layers.stack import MakeBlock
from trainer.models.families import block_class, blocks, stacks
from trainer.ops.scaled import Scaled, scaled
from trainer.sharding import Axes

DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
PLACES = "activation_kv_length"  # the cache axis with one entry per position


def init_cache(config: Config, rows: int, length: int) -> Cache:
    """Returns empty caches for all layers, for `rows` rows of up to `length` positions.

    The caches are stacked if the loop over layers is rolled. An unrolled loop has separate arrays
    (`Layers`), because reading a layer's cache from a stacked array would copy it.
    """

    def empty(block: Any, count: int) -> Any:
        def held(names: Axes, array: jax.Array) -> Any:
            shared = _shared(config, names, array)
            return scaled(array, jnp.dtype(DTYPES[config.kv_quant_dtype]), shared) if shared else array

        one = jax.tree.map(held, _names(block), block.init_cache(rows, length), is_leaf=_is_axes)

        def stacked(layers: int) -> Any:
            return jax.tree.map(lambda array: jnp.broadcast_to(array, (layers, *array.shape)), one)

        return stacked(count) if config.scan_layers else Layers([stacked(1) for _ in range(count)])

    return Cache(_of_blocks(config, empty))


def cache_axes(config: Config) -> Any:
    """Returns the logical axes of the arrays of `init_cache`: an `Axes` in place of each array.

    A block names the axes of its arrays with `cache_axes()`. Without that method, only rows and positions have names:
    the second axis is `PLACES` if its size depends on the length.
    """

    def named(block: Any, count: int) -> Any:
        def held(names: Axes, array: jax.ShapeDtypeStruct) -> Any:
            stacked, shared = Axes((None, *names)), _shared(config, names, array)
            if not shared:
                return stacked
            scale = Axes(None if axis - len(stacked) in shared else name for axis, name in enumerate(stacked))
            return Scaled(stacked, scale)  # type: ignore[arg-type]  # contains axes instead of arrays

        one = jax.tree.map(held, _names(block), _shapes(block, 1), is_leaf=_is_axes)
        return one if config.scan_layers else Layers([one] * count)

    return _of_blocks(config, named)


def packs_rows(config: Config) -> bool:
    """Returns whether the prompts of several cache rows may share a row of tokens.

    This is the case if, in each block, either every cache array has an axis of positions, or the attribute `packs_rows`
    is true. A block sets `packs_rows` if, given `Cache.rows`, it returns a separate state for each cache row.
    """

    def packs(block: Any, count: int) -> bool:
        del count
        each = jax.tree.leaves(_names(block), is_leaf=_is_axes)
        return getattr(block, "packs_rows", False) or all(PLACES in names for names in each)

    return all(value for of_stack in _of_blocks(config, packs).values() for value in of_stack)


def _shared(config: Config, names: Axes, array: Any) -> list[int]:
    """Returns the axes, as negative indices, along which the entries of a cache's array share one scale.

    Returns [] for an array that is not quantized, such as state without positions or a single number per position.
    """
    if not config.quantize_kvcache or PLACES not in names or not jnp.issubdtype(array.dtype, jnp.floating):
        return []
    of_token = range(-1, names.index(PLACES) - array.ndim, -1)
    return list(of_token[:1] if config.kv_quant_axis == "dkv" else of_token)


def _names(block: Any) -> Any:
    """Returns the logical axes of the arrays of `block.init_cache`."""
    if hasattr(block, "cache_axes"):
        return block.cache_axes()
    return jax.tree.map(_cache_names, _shapes(block, 1), _shapes(block, 2))


def _shapes(block: Any, length: int) -> Any:
    return jax.eval_shape(lambda: block.init_cache(1, length))


def _is_axes(it: Any) -> bool:
    return isinstance(it, Axes)


def _cache_names(array: jax.ShapeDtypeStruct, longer: jax.ShapeDtypeStruct) -> Axes:
    after_rows: list[str | None] = [None] * (array.ndim - 1)
    if array.shape[1:2] != longer.shape[1:2]:
        after_rows[0] = PLACES
    return Axes(("activation_batch", *after_rows))


def _of_blocks(config: Config, value: Callable[[Any, int], Any]) -> dict[str, list[Any]]:
    """Returns a dict from the name of each stack to a list with `value(block, count)` for each block of the stack's
    pattern. The blocks are constructed with abstract arrays; `count` is the stack's."""

    def shapes(block: MakeBlock) -> Any:
        return nnx.eval_shape(lambda: block(config, nnx.Rngs(0)))

    return {stack.name: [value(shapes(block), stack.count) for block in stack.blocks] for stack in stacks(config)}


def takes_cache(config: Config) -> bool:
    """Returns whether every block makes a cache, which sampling requires. Linen blocks make none."""
    classes = map(block_class, blocks(stacks(config)))
    return all(issubclass(made, nnx.Module) and hasattr(made, "init_cache") for made in classes)

"""Assembles the leaves of a checkpoint on devices, as they are or quantized."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer.checkpoint.source import Leaf, Tick, names_of, nested, resharded


def place(leaf: Leaf, abstract: jax.ShapeDtypeStruct, tick: Tick) -> jax.Array:
    """Returns the leaf on the devices, with dtype and sharding of `abstract`."""
    (array,) = _assembled(leaf, abstract, {"": abstract}, lambda value: {"": value}, tick).values()
    return array


def place_quantized(
    name: str, leaf: Leaf, parts: Mapping[str, jax.ShapeDtypeStruct], store: Callable[[jax.Array], Any], tick: Tick
) -> dict[str, jax.Array]:
    """Returns what is stored for the kernel `name`, by the names of its parts (`names_of`), layer by layer.

    Args:
      leaf: the float kernel.
      parts: as shapes with shardings. Each has the axes of the kernel.
      store: returns what is stored for a kernel, or for a part of its layers.
    """
    like = next(iter(parts.values()))
    on_device = resharded(like.sharding, len(leaf.shape), lambda axes: axes)
    abstract = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=on_device)
    return _assembled(leaf, abstract, parts, lambda value: names_of(nested({name: store(value)})), tick)


def _assembled(
    leaf: Leaf,
    abstract: jax.ShapeDtypeStruct,
    parts: Mapping[str, jax.ShapeDtypeStruct],
    convert: Callable[[jax.Array], Mapping[str, jax.Array]],
    tick: Tick,
) -> dict[str, jax.Array]:
    """Returns arrays like `parts`, made of what `convert` returns for some layers of `leaf`, placed like `abstract`."""
    count, ndim = len(leaf.puts), len(leaf.shape)

    def of_layers(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (like.shape[0] // count, *like.shape[1:])
        sharding = resharded(like.sharding, ndim, lambda axes: [None, *axes[1:]])
        return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)

    if count == 1:
        found = _converted(convert, leaf.puts[0](abstract), {name: part.sharding for name, part in parts.items()})
        tick(leaf.nbytes)
        return found
    layer = of_layers(abstract)
    shardings = {name: of_layers(part).sharding for name, part in parts.items()}
    arrays = {
        name: jnp.zeros(part.shape, part.dtype, device=resharded(part.sharding, ndim, lambda axes: axes))
        for name, part in parts.items()
    }
    for i, put in enumerate(leaf.puts):
        for name, part in _converted(convert, put(layer), shardings).items():
            arrays[name] = _with_part(arrays[name], part, i * part.shape[0])
        tick(leaf.nbytes // count)
    return {name: jax.device_put(array, parts[name].sharding) for name, array in arrays.items()}


def _converted(
    convert: Callable[[jax.Array], Mapping[str, jax.Array]], value: jax.Array, shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Waits for the result, so that the host memory of `value` is free before the next part is read."""
    if [*shardings] == [""]:
        return {"": value.block_until_ready()}
    return jax.block_until_ready(jax.jit(convert, out_shardings=dict(shardings))(value))


@functools.partial(jax.jit, donate_argnums=0)
def _with_part(array: jax.Array, part: jax.Array, start: int) -> jax.Array:
    """Writes `part` into `array` in place, starting at index `start` of the first axis."""
    return jax.lax.dynamic_update_slice_in_dim(array, part, start, axis=0)

"""Assembles the leaves of a checkpoint on devices, unchanged or quantized."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.leaves.source import Leaf, Tick, names_of, nested, resharded

SMALL = 1 << 20  # bytes; layers of smaller leaves are assembled on the host, without compilation
# Takes the shardings of a leaf's parts, and returns a function that converts some layers of the leaf to these parts.
Convert = Callable[[Mapping[str, Any]], Callable[[jax.Array], Mapping[str, jax.Array]]]


def place(leaf: Leaf, abstract: jax.ShapeDtypeStruct, tick: Tick) -> jax.Array:
    """Returns the leaf on the devices, with the dtype and the sharding of `abstract`."""
    (array,) = _assembled(leaf, abstract, {"": abstract}, lambda shardings: lambda value: {"": value}, tick).values()
    return array


def place_quantized(
    name: str, leaf: Leaf, parts: Mapping[str, jax.ShapeDtypeStruct], store: Callable[[jax.Array], Any], tick: Tick
) -> dict[str, jax.Array]:
    """Quantizes the kernel `name` layer by layer, and returns its stored parts, by the parts' names (`names_of`).

    Args:
      leaf: the float kernel.
      parts: the shapes and shardings of the stored parts. Each part has the kernel's axes.
      store: converts a kernel, or some of its layers, to stored form.
    """
    like = next(iter(parts.values()))
    on_device = resharded(like.sharding, len(leaf.shape), lambda axes: axes)
    abstract = jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=on_device)

    def stored(value: jax.Array) -> dict[str, jax.Array]:
        return names_of(nested({name: store(value)}))

    return _assembled(leaf, abstract, parts, lambda shardings: jax.jit(stored, out_shardings=dict(shardings)), tick)


def _assembled(
    leaf: Leaf,
    abstract: jax.ShapeDtypeStruct,
    parts: Mapping[str, jax.ShapeDtypeStruct],
    convert: Convert,
    tick: Tick,
) -> dict[str, jax.Array]:
    """Returns arrays with the shapes and shardings of `parts`. `leaf` is converted a few layers at a time."""
    count, ndim = len(leaf.puts), len(leaf.shape)

    def of_layers(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (like.shape[0] // count, *like.shape[1:])
        sharding = resharded(like.sharding, ndim, lambda axes: [None, *axes[1:]])
        return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)

    if count == 1:
        converted = convert({name: part.sharding for name, part in parts.items()})
        found = jax.block_until_ready(dict(converted(leaf.puts[0](abstract))))
        tick(leaf.nbytes)
        return found
    layer, converted = of_layers(abstract), convert({name: of_layers(part).sharding for name, part in parts.items()})
    if leaf.nbytes <= SMALL and all(part.sharding.is_fully_addressable for part in parts.values()):
        layers = []
        for put in leaf.puts:
            layers.append(jax.device_get(dict(converted(put(layer)))))
            tick(leaf.nbytes // count)
        whole = {name: np.concatenate([each[name] for each in layers]) for name in parts}
        return {name: jax.device_put(array, parts[name].sharding) for name, array in whole.items()}
    arrays = {
        name: jnp.zeros(part.shape, part.dtype, device=resharded(part.sharding, ndim, lambda axes: axes))
        for name, part in parts.items()
    }
    for i, put in enumerate(leaf.puts):
        # Wait before the next layers are read, to free the host memory of these layers.
        for name, part in jax.block_until_ready(dict(converted(put(layer)))).items():
            arrays[name] = _with_part(arrays[name], part, i * part.shape[0])
        tick(leaf.nbytes // count)
    return {name: jax.device_put(array, parts[name].sharding) for name, array in arrays.items()}


@functools.partial(jax.jit, donate_argnums=0)
def _with_part(array: jax.Array, part: jax.Array, start: int) -> jax.Array:
    """Writes `part` into `array` in place, starting at index `start` of the first axis."""
    return jax.lax.dynamic_update_slice_in_dim(array, part, start, axis=0)

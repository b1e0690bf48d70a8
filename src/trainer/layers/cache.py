"""Caches: what blocks keep of earlier positions during sampling.

A block makes its own, `block.init_cache(rows, length)`: a pytree of arrays [b, length, ...] (or of other arrays whose
first axis is the rows). A stack holds those of all its layers stacked on axis 0, and gives each block a view.
A write changes only the positions that are written, so that a loop over tokens updates its caches in place.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """One layer's view of the caches of a stack, or of all stacks (`layer` is None then).

    Attributes:
      entries: arrays [layers, b, ...] of a stack; those of all stacks by name.
      layer: the index of the layer that this view belongs to.
      filled: it contains earlier positions. Otherwise a call sees only its own tokens, so attention runs as
        in training, with any op.
    """

    entries: Any
    layer: Any = None
    filled: bool = dataclasses.field(default=False, metadata={"static": True})

    def read(self) -> Any:
        """This layer's arrays, [b, ...] each."""
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False), self.entries)

    def replace(self, entries: Any) -> "Cache":
        """The cache with `entries`, arrays [b, ...], for this layer."""

        def update(array: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(array, new.astype(array.dtype), self.layer, 0)

        return dataclasses.replace(self, entries=jax.tree.map(update, self.entries, entries))

    def write(self, entries: Any, place_bt: jax.Array, segment_bt: jax.Array) -> "Cache":
        """The cache with `entries` [b, t, ...] at positions `place_bt` of this layer; padding (segment 0) is not
        written."""

        row_b1 = jnp.arange(place_bt.shape[0])[:, None]

        def update(array: jax.Array, new: jax.Array) -> jax.Array:
            places = jnp.where(segment_bt != 0, place_bt, array.shape[2])  # beyond the end: dropped
            return array.at[self.layer, row_b1, places].set(new.astype(array.dtype), mode="drop")

        return dataclasses.replace(self, entries=jax.tree.map(update, self.entries, entries))

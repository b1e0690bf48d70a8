"""Caches: the data of earlier positions that blocks keep during generation.

`block.init_cache(rows, length)` makes the cache of a block: a pytree of arrays [b, length, ...] (or of other arrays
whose first axis is the rows). A stack stores the caches of all its layers, stacked on axis 0 or as `Layers`, and gives
each block a view. A write changes only the written entries, so a loop over tokens updates the caches in place.

The entry of position p has index p mod length, so attention with a window can use a cache that is only as long as the
window: a ring buffer.

`models.caches` may choose to store an array in quantized form, as `Scaled`. Blocks are not affected: this module
quantizes on writes and dequantizes on reads. Even the entries that are written in the current call are attended to in
quantized form, so results do not depend on how a prompt was divided into calls.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.ops.attention import Mask
from trainer.ops.scaled import Scaled, scaled
from trainer.products.context import Context

_NOWHERE = -1  # the segment of an entry without a token


class Layers(NamedTuple):  # a NamedTuple, because JAX flattens it without calling Python
    """Unstacked data of a stack's layers, for an unrolled loop: `each` has one pytree per layer."""

    each: Sequence[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """One layer's view of the caches of a stack; or, if `layer` is None, the caches of all stacks.

    Attributes:
      entries: a stack's entries [layers, b, ...], each an array or a `Scaled`; or the entries of all stacks, by name.
        An unrolled loop stores a stack's entries as `Layers` of arrays [1, b, ...].
      layer: the index of the layer to which this view belongs.
      rows: int [b, t], the cache row to which each token is written, if a row of tokens contains several prompts. None:
        each row of tokens is one segment with a separate cache row.
      apart: if not 0, each of the first `apart` tokens of a row is a separate sequence, and the others are padding. All
        layers except attention then process one long row instead of `apart` rows of one token.
      filled: whether the cache contains earlier positions. If not, tokens attend only to tokens of the current call, so
        attention runs as in training, with any op.
    """

    entries: Any
    layer: Any = None
    rows: Any = None
    apart: int = dataclasses.field(default=0, metadata={"static": True})
    filled: bool = dataclasses.field(default=False, metadata={"static": True})

    def read(self) -> Any:
        """Returns this layer's arrays, [b, ...] each."""
        return _arrays(
            jax.tree.map(lambda held: jax.lax.dynamic_index_in_dim(held, self.layer, keepdims=False), self.entries)
        )

    def replace(self, entries: Any) -> "Cache":
        """Returns the cache with this layer's arrays replaced by `entries`, arrays [b, ...]."""

        def update(array: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(array, new, self.layer, 0)

        return dataclasses.replace(self, entries=jax.tree.map(update, self.entries, self._held(entries)))

    def part(self, name: str) -> "Cache":
        """Returns the view of `entries[name]`, for a layer whose entries are a dict, for example with one part for keys
        and values and one for recurrent state."""
        return dataclasses.replace(self, entries=self.entries[name])

    def with_part(self, name: str, part: "Cache") -> "Cache":
        """Returns the cache with `entries[name]` replaced by the entries of `part`."""
        return dataclasses.replace(self, entries={**self.entries, name: part.entries})

    def write(self, entries: Any, context: Context) -> "Cache":
        """Returns the cache with `entries` [b, t, ...] written to the indices of the tokens of `context`.

        Padding (segment 0) is not written. If a row has more tokens than the cache has positions, only the row's last
        tokens are written, as many as fit.
        """
        return self._written(self._held(entries), context)

    def _held(self, entries: Any) -> Any:
        """Returns arrays [b, ...] in the storage format of the cache."""
        return jax.tree.map(_like, self.entries, entries, is_leaf=_is_scaled)

    def _written(self, held: Any, context: Context) -> "Cache":
        position_bt = context.positions
        row_bt = self.rows
        if row_bt is None:
            row_bt = jnp.broadcast_to(jnp.arange(position_bt.shape[0])[:, None], position_bt.shape)

        def update(array: jax.Array, new: jax.Array) -> jax.Array:
            rows, length = array.shape[1:3]
            kept = context.segments != 0
            if position_bt.shape[1] > length:
                real = jnp.where(kept, position_bt, -1)
                last = jax.ops.segment_max(real.ravel(), row_bt.ravel(), num_segments=rows)
                kept &= position_bt > last[row_bt] - length
            index_bt = jnp.where(kept, position_bt % length, length)  # a write past the end is dropped
            return array.at[self.layer, row_bt, index_bt].set(new, mode="drop")

        return dataclasses.replace(self, entries=jax.tree.map(update, self.entries, held))

    def extend(self, entries: Any, context: Context, window: int = 0) -> tuple["Cache", Any, Mask]:
        """Adds the `entries` [b, t, ...] of the tokens of `context`. In each row, the tokens must be a contiguous part
        of a sequence.

        `window`: the attention's window; 0 for none. The cache must be at least as long as the window or
        the whole sequence.

        Returns:
          The updated cache; the entries [b, s, ...] that the tokens can attend to; and the mask. The entries in the
          result include those of earlier positions if the cache is filled; otherwise they are the given `entries`.
        """
        if self.apart:
            entries = jax.tree.map(self.parted, entries)
            places = self.parted(context.positions), self.parted(context.segments)
            context = context._replace(positions=places[0], segments=places[1])
        held = self._held(entries)
        after, own = self._written(held, context), _arrays(held)
        if not self.filled:
            return after, own, own_mask(context)
        assert self.rows is None, "a filled cache has a row for each row of tokens"
        real = context.segments != 0
        if window and context.positions.shape[1] > 1:
            # Read before the write: later tokens may overwrite entries to which earlier tokens of this call attend.
            before = self.read()
            first = jnp.where(real, context.positions, jnp.iinfo(jnp.int32).max).min(axis=1)
            earlier = _over_cache(context, first - 1, _length(before))
            joined = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), before, own)
            keys = (jnp.concatenate(pair, axis=1) for pair in zip(earlier[1::2], own_mask(context)[1::2], strict=True))
            key_position, key_segment = keys
            return after, joined, Mask(context.positions, key_position, context.segments, key_segment)
        stored = after.read()
        last = jnp.where(real, context.positions, -1).max(axis=1)
        return after, stored, _over_cache(context, last, _length(stored))

    def parted(self, x: jax.Array) -> jax.Array:
        """Returns `x` [b, t, ...] as [b * apart, 1, ...], with one row per sequence. If `apart` is 0, returns `x`."""
        return x[:, : self.apart].reshape(-1, 1, *x.shape[2:]) if self.apart else x

    def joined(self, x: jax.Array, length: int) -> jax.Array:
        """Inverts `parted`: returns rows of `length` tokens, with zeros after the first `apart` tokens."""
        if not self.apart:
            return x
        x = x.reshape(-1, self.apart, *x.shape[2:])
        return jnp.pad(x, ((0, 0), (0, length - self.apart), *((0, 0) for _ in x.shape[2:])))


def own_mask(context: Context) -> Mask:
    """Returns the mask for attention among the tokens of `context`."""
    return Mask(context.positions, context.positions, context.segments, context.segments, context.documents)


def _is_scaled(held: Any) -> bool:
    return isinstance(held, Scaled)


def _arrays(held: Any) -> Any:
    return jax.tree.map(lambda it: it.array() if _is_scaled(it) else it, held, is_leaf=_is_scaled)


def _like(held: Any, array: jax.Array) -> Any:
    """Returns `array` [b, ...] in the storage format of `held` [layers, b, ...]."""
    if not _is_scaled(held):
        lossy = jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.issubdtype(held.dtype, jnp.inexact)
        assert not lossy, f"a cache of {held.dtype} has no scale for entries of {array.dtype}"
        return array.astype(held.dtype)
    shared = [axis - held.scale.ndim for axis, size in enumerate(held.scale.shape) if axis > 2 and size == 1]
    return scaled(array.astype(held.scale.dtype), held.value.dtype, shared)


def _length(entries: Any) -> int:
    return jax.tree.leaves(entries)[0].shape[1]


def _over_cache(context: Context, last_b: jax.Array, length: int) -> Mask:
    """Returns the mask for the tokens of `context` over a cache that contains each row's positions up to `last_b`."""
    position = last_b[:, None] - (last_b[:, None] - jnp.arange(length)) % length
    segment = jnp.where(position >= 0, context.segments.max(axis=1, keepdims=True), _NOWHERE)
    return Mask(context.positions, position, context.segments, segment)

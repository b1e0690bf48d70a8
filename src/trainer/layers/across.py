"""Context parallelism: attention when the tokens of each row are split over devices (docs/guides/context.md).

The strategies:

all_gather: each device gathers all keys and values.
ring: keys and values travel from device to device (`ops.ring`); no device ever stores all keys of a row.
ulysses: an all-to-all gives each device some heads of whole rows (DeepSpeed-Ulysses, arXiv:2309.14509).
usp: Ulysses over the last mesh axis that shards tokens, and a ring over the other axes that shard tokens (USP,
arXiv:2405.07719).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer import sharding
from trainer.ops.attention import Dropout, Mask
from trainer.ops.ring import Ring, ring_attention, ring_largest

QUERY_ROWS = sharding.Axes(("activation_batch", "activation_q_length"))
KEY_ROWS = sharding.Axes(("activation_batch", "activation_kv_length"))
QUERIES = sharding.Axes((*QUERY_ROWS, "activation_heads", None))
KEYS = sharding.Axes((*KEY_ROWS, "activation_kv_heads", None))
HEADS = sharding.Axes(("activation_heads",))
_MASK = Mask(QUERY_ROWS, KEY_ROWS, QUERY_ROWS, KEY_ROWS)  # type: ignore[arg-type]  # axes, not arrays

Attend = Callable[..., jax.Array]  # (queries, keys, values, mask, dropout, sinks=sinks) -> [b, t, h, d]
Arrays = tuple[jax.Array, jax.Array, jax.Array, Mask]  # queries, keys, values, mask


class Across(NamedTuple):
    """How attention runs if rows are split over devices.

    `strategy`: see the module's docstring. `order`: the strategy of `ops.order` by which the tokens of a row are
    reordered; "" if they are not reordered.
    """

    strategy: str = "all_gather"
    order: str = ""


GATHERED = Across()


def mask_axes(mask: Mask) -> Mask:
    """Returns the logical axes of the arrays of `mask`."""
    documents: Any = None if mask.documents is None else sharding.Axes(("activation_batch", None))
    return _MASK._replace(documents=documents)


def is_split() -> bool:
    """Returns whether the tokens of each row are split over devices, with the same split for queries and keys."""
    return sharding.shards(QUERY_ROWS[1:]) == sharding.shards(KEY_ROWS[1:]) > 1


def attend(
    across: Across,
    op: Attend,
    arrays: Arrays,
    dropout: Dropout | None,
    sinks: jax.Array | None,
    *,
    ring: Ring | None,
    kernel: bool,
) -> jax.Array:
    """Returns `op(*arrays, dropout, sinks=sinks)`, [b, t, h, d], for arrays that are split over devices.

    Args:
      op: an op of `layers.attention.OPS`, with its static parameters bound. With the strategy all_gather, it must
        accept keys whose positions differ from the queries', or be a kernel with the parameter `among`, such as
        `ops.splash`.
      ring: the parameters of `ring_attention`, if it replaces the op; None: the op is used.
      kernel: whether the op is a kernel. If so, JAX cannot check over which devices the result is replicated.
    """
    whole = arrays[0].shape[2], arrays[1].shape[1]
    drawn = () if dropout is None else (dropout.key, dropout.row)

    def on_device(arrays: Arrays, drawn: Any, sinks: jax.Array | None) -> jax.Array:
        heads, length = mesh_axes("activation_heads"), mesh_axes("activation_q_length")
        over, around = _shared(across.strategy, length)
        here = None
        if dropout is not None:
            count, tokens = arrays[0].shape[2], arrays[0].shape[1]
            first = _index(heads) * count, _index(length) * tokens
            here = Dropout(drawn[0], drawn[1], dropout.rate, whole, *first)
        run = op
        if ring is not None:
            run = functools.partial(ring_attention, ring=_over(ring, around))
        if across.strategy != "all_gather":
            return _by_heads(run, over, arrays, here, sinks)
        if kernel:
            run = functools.partial(op, among=(length, across.order))
        return run(*_gathered(length, arrays), here, sinks=sinks)

    of_drawn = (sharding.Axes(()), sharding.Axes(("activation_batch",)))[: len(drawn)]
    names = (QUERIES, KEYS, KEYS, mask_axes(arrays[3])), of_drawn, None if sinks is None else HEADS
    return sharding.shard_mapped(on_device, names, QUERIES, check=not kernel)(arrays, drawn, sinks)


def largest(queries: jax.Array, keys: jax.Array, mask: Mask, ring: Ring, when: jax.Array | None) -> jax.Array:
    """Returns the largest logit of each head over the tokens of all devices, float32 [h]; see `ops.max_logits`. Keys
    travel around a ring, whatever the strategy."""

    def on_device(queries: jax.Array, keys: jax.Array, mask: Mask, when: jax.Array | None) -> jax.Array:
        length, rows = mesh_axes("activation_q_length"), mesh_axes("activation_batch")

        def found() -> jax.Array:
            return ring_largest(queries, keys, mask, _over(ring, length))

        nothing = jnp.full(queries.shape[2], jnp.finfo(jnp.float32).min)
        here = found() if when is None else jax.lax.cond(when, found, lambda: nothing)
        return jax.lax.pmax(here, (*rows, *length))

    queries, keys = jax.lax.stop_gradient((queries, keys))
    names = QUERIES, KEYS, mask_axes(mask), None if when is None else sharding.Axes(())
    return sharding.shard_mapped(on_device, names, HEADS, check=False)(queries, keys, mask, when)


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the axes of `sharding.mesh_axes(name)` that have more than one device."""
    return tuple(axis for axis in sharding.mesh_axes(name) if jax.lax.axis_size(axis) > 1)


def _shared(strategy: str, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the mesh axes of the all-to-all between tokens and heads, and the mesh axes of the ring."""
    if strategy == "usp":
        innermost = sharding.mesh_axes("activation_q_length")[-1]
        return tuple(a for a in axes if a == innermost), tuple(a for a in axes if a != innermost)
    return (axes, ()) if strategy == "ulysses" else ((), axes if strategy == "ring" else ())


def _gathered(axes: tuple[str, ...], arrays: Arrays) -> Arrays:
    queries, keys, values, mask = arrays
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
    mask = mask._replace(key_position=gather(mask.key_position), key_segment=gather(mask.key_segment))
    return queries, gather(keys), gather(values), mask


def _by_heads(
    run: Attend, axes: tuple[str, ...], arrays: Arrays, dropout: Dropout | None, sinks: jax.Array | None
) -> jax.Array:
    """Returns `run(...)` after an all-to-all over the mesh axes `axes`, which gives each device all tokens along these
    axes and a share of the heads. If the key heads cannot be divided equally, they are repeated."""
    if not axes:
        return run(*arrays, dropout, sinks=sinks)
    queries, keys, values, mask = arrays
    devices, at = jax.lax.axis_size(axes), _index(axes)
    to_heads = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=2, concat_axis=1, tiled=True)
    heads, repeats = queries.shape[2] // devices, devices // math.gcd(devices, keys.shape[2])
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, at * heads, heads)
    if dropout is not None:
        first = dropout.first_query - at * queries.shape[1]
        dropout = dropout._replace(first_head=dropout.first_head + at * heads, first_query=first)
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
    mask = mask._replace(**{name: gather(getattr(mask, name)) for name in Mask._fields if name != "documents"})
    queries, keys, values = map(to_heads, (queries, *(jnp.repeat(x, repeats, axis=2) for x in (keys, values))))
    out = run(queries, keys, values, mask, dropout, sinks=sinks)
    return jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)


def _over(ring: Ring, axes: tuple[str, ...]) -> Ring:
    # CPU processes communicate by Gloo, which mixes up concurrent permutes, because it gives all of them the same tag.
    # So send all arrays together.
    return ring._replace(axes=axes, together=jax.process_count() > 1 and sharding.on_platform("cpu"))


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    return jax.lax.axis_index(axes) if axes else 0

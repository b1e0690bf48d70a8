"""Looks up rows of a table, and sums their gradients."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trainer.sharding.context import constrain, current_mesh, mesh_axes, on_tpu, same_mesh, shard_mapped, shards
from trainer.sharding.rules import Axes, axes_of, entry, spec


def take(
    table: jax.Array,
    ids: jax.Array,
    out_names: Sequence[str | None],
    dtype: jnp.dtype | None = None,
    names: Sequence[str | None] | None = None,
) -> jax.Array:
    """Returns the rows `ids` (any shape, int, not negative) of `table` [rows, ...], sharded by `out_names`.

    The gradient of a row is summed over its occurrences in float32: a bfloat16 sum over the thousands of occurrences of
    a frequent token would stop growing at 256 times one term. The function is differentiable in reverse mode only.
    Under `jax.vmap`, the mapped axis stays sharded only with `spmd_axis_name`.

    Args:
      dtype: the dtype of the result; None: the dtype of the table.
      names: the logical names of the table's axes. If they are given, the gradient's sum is cheaper: on TPUs that
        replicate the table, the sum needs the memory of one table instead of two (`_summed_by_device`), and devices
        that store only some of the table's columns sum only those columns (`_summed_by_columns`).
    """
    dtype = table.dtype if dtype is None else dtype
    add = _sum
    if names is not None and on_tpu() and _only_rows_are_split(names, out_names, ids.ndim):
        add = functools.partial(_summed_by_device, names=names, out_names=out_names, mesh=same_mesh())
    elif names is not None and (at := _by_columns(names, out_names, ids.ndim)) is not None:
        add = functools.partial(_summed_by_columns, at=at)
    steps = [] if names is None else _steps(names, out_names, ids.ndim)
    if steps:  # each device looks up ids in its columns of the table, so the columns' mesh axes must not shard the ids
        last = steps[-1]
        ids = jax.lax.with_sharding_constraint(ids, NamedSharding(last.mesh, PartitionSpec(*last.spec[: ids.ndim])))
    rows = _rows(table, ids, dtype, functools.partial(_in_steps, add, steps))
    for step in reversed(steps):
        rows = jax.lax.with_sharding_constraint(rows, step)
    return constrain(rows, out_names)


_Add = Callable[[Sequence[int], jax.Array, jax.Array], jax.Array]  # `_sum`, or a function with the same result


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rows(table: jax.Array, ids: jax.Array, dtype: jnp.dtype, add: _Add) -> jax.Array:
    # The cast precedes the lookup. With a cast after the lookup, the gradient would also be summed in float32, but
    # devices would exchange float32 rows.
    return table.astype(dtype)[ids]


def _rows_forward(table: jax.Array, ids: jax.Array, dtype: jnp.dtype, add: _Add) -> Any:
    return _rows(table, ids, dtype, add), (table, ids)


def _rows_backward(dtype: jnp.dtype, add: _Add, kept: Any, cotangent: jax.Array) -> Any:
    table, ids = kept  # only the shape and dtype of the table are used
    # The compiler sorts the ids for this sum. Without the barrier, it sorts them before the backward pass and stores
    # the sorted ids throughout that pass.
    ids, cotangent = jax.lax.optimization_barrier((ids, cotangent))
    gradient = add(table.shape, ids, cotangent)
    # If a head is tied to the table, the gradients of both are added. Without this barrier, the compiler all-gathers
    # the head's gradient for this addition.
    return jax.lax.optimization_barrier(gradient).astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def _sum(shape: Sequence[int], ids: jax.Array, rows: jax.Array, ordered: bool = False) -> jax.Array:
    """Returns a float32 array of `shape`. Its entry at each index of the first axis is the sum of the `rows` with this
    id."""
    return jnp.zeros(shape, jnp.float32).at[ids].add(rows.astype(jnp.float32), indices_are_sorted=ordered)


def _steps(names: Sequence[str | None], out_names: Sequence[str | None], ndim: int) -> list[NamedSharding]:
    """Returns a list of shardings of looked-up rows. They lead step by step from the sharding of the ids to the
    sharding of the table's columns. The list is empty unless the columns' mesh axes, such as fsdp and context, shard
    more than one axis of the ids.

    Each step is one all-to-all. Without the steps, the compiler all-gathers the rows of all ids.
    """
    current = current_mesh.get()
    if current is None or jax.sharding.get_abstract_mesh().manual_axes:
        return []
    mesh, rules = current
    columns = [axis for name in spec(names[1:], rules) for axis in axes_of(name) if mesh.shape[axis] > 1]
    of_ids = [axes_of(name) for name in spec(out_names[:ndim], rules)]
    shared = [[axis for axis in axes if axis in columns] for axes in of_ids]
    if sum(map(bool, shared)) < 2:
        return []
    steps, moved = [], []
    for i in range(ndim):
        of_ids[i] = tuple(axis for axis in of_ids[i] if axis not in shared[i])
        moved += shared[i]
        if shared[i]:
            steps.append(NamedSharding(mesh, PartitionSpec(*map(entry, of_ids), entry(moved))))
    return steps


def _in_steps(
    add: _Add, steps: list[NamedSharding], shape: Sequence[int], ids: jax.Array, rows: jax.Array
) -> jax.Array:
    for step in steps:
        rows = jax.lax.with_sharding_constraint(rows, step)
    return add(shape, ids, rows)


def _only_rows_are_split(names: Sequence[str | None], out_names: Sequence[str | None], ndim: int) -> bool:
    """Returns whether the ids, an array with `ndim` axes, are sharded and the table is replicated."""
    if current_mesh.get() is None or jax.sharding.get_abstract_mesh().manual_axes:
        return False
    return shards(out_names[:ndim]) > 1 == shards(names) == shards(out_names[ndim:])


def _summed_by_device(
    shape: Sequence[int],
    ids: jax.Array,
    rows: jax.Array,
    *,
    names: Sequence[str | None],
    out_names: Sequence[str | None],
    mesh: Callable[[], contextlib.AbstractContextManager[None]],
) -> jax.Array:
    """Returns the same as `_sum`, for the case `_only_rows_are_split`: each device sums its rows in the order of their
    ids, then an all-reduce adds the results.

    If the ids are sorted, libtpu all-reduces the sum in place. If the ids are not sorted, libtpu computes the sum with
    another kernel, and the all-reduce needs a second float32 array of the table's size.

    `mesh`: a function that returns the mesh context of the forward pass (`same_mesh`), because JAX may trace the
    backward pass outside of this context.
    """
    of_ids = Axes(out_names[: ids.ndim])

    def on_device(ids: jax.Array, rows: jax.Array) -> jax.Array:
        ids, rows = ids.reshape(-1), rows.reshape(-1, *shape[1:])
        order = jnp.argsort(ids)
        axes = [axis for name in of_ids if name is not None for axis in mesh_axes(name)]
        return jax.lax.psum(_sum(shape, ids[order], rows[order], ordered=True), axes)

    with mesh():
        return shard_mapped(on_device, (of_ids, Axes(out_names)), Axes(names), check=False)(ids, rows)


def _by_columns(
    names: Sequence[str | None], out_names: Sequence[str | None], ndim: int
) -> tuple[NamedSharding, NamedSharding] | None:
    """Returns a pair for `_summed_by_columns`: the sharding of the ids, and that of the rows. Returns None unless the
    ids are sharded over all mesh axes of the columns and over at least one other mesh axis."""
    current = current_mesh.get()
    if current is None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    mesh, rules = current
    columns = [axis for name in spec(names[1:], rules) for axis in axes_of(name)]
    rest = [[axis for axis in axes_of(name) if axis not in columns] for name in spec(out_names[:ndim], rules)]
    sizes = shards(out_names[:ndim]), shards(names[1:])
    others = math.prod(mesh.shape[axis] for axes in rest for axis in axes)
    whole = shards(names[:1]) == 1 == shards(out_names[ndim:])
    if not whole or others == 1 or sizes[1] == 1 or sizes[0] != others * sizes[1]:
        return None
    of_ids = [entry(axes) for axes in rest]
    of_rows = [*of_ids, *spec(names[1:], rules)]
    return NamedSharding(mesh, PartitionSpec(*of_ids)), NamedSharding(mesh, PartitionSpec(*of_rows))


def _summed_by_columns(
    shape: Sequence[int], ids: jax.Array, rows: jax.Array, *, at: tuple[NamedSharding, NamedSharding]
) -> jax.Array:
    """Returns the same as `_sum`. The rows are resharded so that each device has more rows but only its columns. Each
    device sums its rows, and the sums are all-reduced over the mesh axes that do not shard columns. Without the
    resharding, every device would all-reduce the whole table."""
    ids, rows = jax.tree.map(jax.lax.with_sharding_constraint, (ids, rows), at)
    return _sum(shape, ids, rows)

"""The sharding functions for layers. They take logical axis names only.

Outside of `on_mesh` they do nothing, so a layer also works in a notebook. Inside `shard_mapped` they shard arrays over
the mesh axes that are not manual there.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.sharding.rules import Axes, Rules, axes_of, entry, named_sharding, spec, without_fsdp

# The rule of this name lists the mesh axes over which traced code is mapped by `jax.vmap(..., spmd_axis_name=...)`.
MAPPED = "mapped"

_STAGE = "activation_stage"  # the axis of the stages of a pipeline, in activations
_OF_STAGES = (_STAGE, "stages")  # and in parameters

_current: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar("mesh and rules", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """A context in which traced code shards its arrays over `mesh` by `rules`."""
    with _traced_on((mesh, rules)):
        yield


@contextlib.contextmanager
def off_mesh() -> Iterator[None]:
    """A context in which traced code shards nothing, e.g. initialization with shapes that the mesh does not divide."""
    with _traced_on(None):
        yield


@contextlib.contextmanager
def _traced_on(where: tuple[Mesh, Rules] | None) -> Iterator[None]:
    token = _current.set(where)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def inside_stages() -> Iterator[None]:
    """A context in which only `activation_stage`, and `stages` of parameters, are sharded over the stages of a
    pipeline."""
    current = _current.get()
    with _traced_on(None if current is None else (current[0], _without_stages(current[1]))):
        yield


def _without_stages(rules: Rules) -> Rules:
    taken = rules[_STAGE]
    return {
        name: axes if name in _OF_STAGES else tuple(a for a in axes if a not in taken) for name, axes in rules.items()
    }


def over_stages(fn: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    """Returns `fn`, mapped over the stages of a pipeline: `in_axes` as in `jax.vmap`. Inside, all arrays are sharded
    over the stages along the mapped axis."""
    current = _current.get()
    if current is None:
        return jax.vmap(fn, in_axes)
    mesh, rules = current
    inside = {**rules, MAPPED: (*rules.get(MAPPED, ()), *rules[_STAGE])}

    def on_stage(*args: Any) -> Any:
        with _traced_on((mesh, inside)):
            return fn(*args)

    return jax.vmap(on_stage, in_axes, spmd_axis_name=rules[_STAGE])


def same_mesh() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function that makes a context with the current mesh and rules, for code that is traced later, such as a
    backward pass."""
    return functools.partial(_traced_on, _current.get())


def on_platform(name: str) -> bool:
    """Returns whether traced code will run on devices of the platform `name`: cpu, gpu or tpu.

    Looks at the devices of the mesh or, outside of `on_mesh`, at JAX's default devices.
    """
    current = _current.get()
    return (current[0].devices.flat[0].platform if current else jax.default_backend()) == name


def on_tpu() -> bool:
    """Returns whether traced code will run on TPUs; see `on_platform`."""
    return on_platform("tpu")


def sum_dtype(x: jax.Array) -> jnp.dtype | None:
    """Returns the `preferred_element_type` of a product with `x`, whose result is then cast to the dtype of `x`.

    Every platform adds up products of bfloat16 in float32. XLA's CPU backend has fast code only for those that return
    float32: a product of bfloat16 that returns bfloat16 takes 2.5 to 4 times as long. None: the result is in the dtype
    of `x` already.
    """
    return jnp.dtype(jnp.float32) if x.dtype == jnp.bfloat16 and on_platform("cpu") else None


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Returns `x`, sharded by the logical names of its axes.

    Raises:
      UserError: see `rules.named_sharding`.
    """
    at = _sharding(names, x.shape)
    return x if at is None else jax.lax.with_sharding_constraint(x, at)


def gathered_over_fsdp(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Returns `x`, sharded by the logical names of its axes, but not over the mesh axes of `rules.FSDP`. Its gradient
    is sharded over these, too."""
    at = _sharding(names, x.shape)
    return x if at is None else _resharded(jax.lax.with_sharding_constraint(x, at), without_fsdp(at), at)


def with_gradient_over(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Returns `x`, whose gradient is sharded by the logical names of its axes, however `x` is sharded."""
    at = _sharding(names, x.shape)
    return x if at is None else _resharded(x, None, at)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _resharded(x: jax.Array, to: NamedSharding | None, back: NamedSharding) -> jax.Array:
    return x if to is None else jax.lax.with_sharding_constraint(x, to)


def _resharded_forward(x: jax.Array, to: NamedSharding | None, back: NamedSharding) -> tuple[jax.Array, None]:
    return _resharded(x, to, back), None


def _resharded_backward(to: NamedSharding | None, back: NamedSharding, _: None, cotangent: jax.Array) -> Any:
    return (jax.lax.with_sharding_constraint(cotangent, back),)


_resharded.defvjp(_resharded_forward, _resharded_backward)


def for_product(x: jax.Array, rows: Sequence[str | None], names: Sequence[str | None]) -> jax.Array:
    """`x` [*rows, *axes], an input or the result of a product with a matrix whose axes on its side are called `names`:
    sharded as these, but not over mesh axes that shard rows: over those the matrix is gathered.

    Without it, XLA in jaxlib 0.10.2 returns wrong rows if data, fsdp and tensor are all above 1 and there are few
    tokens (docs/decisions/0021). libtpu does not; its programs stay as they are.
    """
    current = _current.get()
    if current is None or on_tpu() or jax.sharding.get_abstract_mesh().manual_axes:
        return x
    mesh, rules = current
    taken = {axis for of_name in spec(rows, rules) for axis in axes_of(of_name)}
    rest = [tuple(axis for axis in axes_of(of_name) if axis not in taken) for of_name in spec(names, rules)]
    partition = PartitionSpec(*spec(rows, rules), *map(entry, rest))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the manual mesh axes of the logical axis `name`, for collectives inside `shard_mapped`.

    Returns () outside of `shard_mapped` and for axes that are not manual there. A sum over no axes is the array itself,
    so `jax.lax.psum(x, mesh_axes("activation_kv_length"))` is correct inside and outside.

    Raises:
      UserError: `name` has no rule.
    """
    current = _current.get()
    if current is None:
        return ()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes_of(spec([name], current[1])[0]) if axis in manual)


def shards(names: Sequence[str | None]) -> int:
    """Returns the number of parts into which the compiler shards an array with axes `names`; 1 outside of `on_mesh`.

    Inside `shard_mapped`, manual mesh axes do not count.
    """
    current = _current.get()
    if current is None:
        return 1
    manual = jax.sharding.get_abstract_mesh().manual_axes
    found = {axis for of_name in spec(names, current[1]) for axis in axes_of(of_name)}
    return math.prod(current[0].shape[axis] for axis in found if axis not in manual)


def _sharding(names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding | None:
    """Returns the sharding of an array of `shape` with axes called `names`; None outside of a mesh.

    Inside `shard_mapped`, `shape` is the shape of one device's part, and manual mesh axes are left out.
    """
    current = _current.get()
    if current is None:
        return None
    mesh, rules = current
    inside = jax.sharding.get_abstract_mesh()
    if not inside.manual_axes:
        return named_sharding(mesh, names, shape, rules)
    if any(axis in inside.manual_axes for axis in rules.get(MAPPED, ())):
        return None  # JAX's vmap rule would add the mapped axis, which is manual here; the compiler chooses a sharding
    free = {name: tuple(axis for axis in axes if axis not in inside.manual_axes) for name, axes in rules.items()}
    return named_sharding(inside, names, shape, free)


def reduce_gradient_early(
    x: jax.Array,
    matrix: jax.Array,
    names: Sequence[str | None],
    gathered: Sequence[str | None] | None = None,
    rows: Sequence[str | None] = (),
) -> tuple[jax.Array, jax.Array]:
    """Returns `x` and `matrix` for their product. In the backward pass, the weight gradient is reduced over devices
    before the input gradient is used.

    Otherwise the compiler keeps the unreduced gradient of a matrix at the end of a model through the backward pass of
    all layers. If a TPU device has more rows than the matrix has inputs, the matrix is all-gathered before the product.
    Otherwise libtpu computes the product as a ring and holds two copies of the result, which is larger than the matrix.

    Args:
      x: [*rows, *inputs]. Inside `shard_mapped`, where each device has gradients of its own, `x` and `matrix` are
        returned unchanged.
      matrix: [*inputs, *outputs] or [*outputs, *inputs].
      names: the logical names of the axes of `matrix`.
      gathered: the logical names of the same axes in the product, with None for inputs. If not given, the matrix is
        never all-gathered.
      rows: the logical names of the row axes of `x`.
    """
    at = _sharding(names, matrix.shape)
    if at is None or jax.sharding.get_abstract_mesh().manual_axes:
        return x, matrix
    if gathered is None or not on_tpu():
        return _reduced(x, matrix, at, at)
    inputs = math.prod(size for size, name in zip(matrix.shape, gathered, strict=True) if name is None)
    if x.size // inputs // _parts(rows) <= inputs:
        return _reduced(x, matrix, at, at)
    inside = _sharding(gathered, matrix.shape)
    assert inside is not None
    return _reduced(x, matrix, at, inside)


def _parts(names: Sequence[str | None]) -> int:
    """Returns the number of parts into which an array with axes `names` is sharded."""
    current = _current.get()
    assert current is not None
    mesh, rules = current
    return math.prod(mesh.shape[axis] for of_name in spec(names, rules) for axis in axes_of(of_name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _reduced(x: jax.Array, matrix: jax.Array, at: NamedSharding, inside: NamedSharding) -> tuple[jax.Array, jax.Array]:
    return x, matrix if inside == at else jax.lax.with_sharding_constraint(matrix, inside)


def _reduced_forward(x: jax.Array, matrix: jax.Array, at: NamedSharding, inside: NamedSharding) -> Any:
    return _reduced(x, matrix, at, inside), None


def _reduced_backward(
    at: NamedSharding, inside: NamedSharding, _: None, cotangents: tuple[jax.Array, jax.Array]
) -> Any:
    input_gradient, weight_gradient = cotangents
    if inside != at:
        weight_gradient = jax.lax.with_sharding_constraint(weight_gradient, inside)
    return jax.lax.optimization_barrier((input_gradient, jax.lax.with_sharding_constraint(weight_gradient, at)))


_reduced.defvjp(_reduced_forward, _reduced_backward)


def take(
    table: jax.Array,
    ids: jax.Array,
    out_names: Sequence[str | None],
    dtype: jnp.dtype | None = None,
    names: Sequence[str | None] | None = None,
) -> jax.Array:
    """Returns the rows `ids` (any shape, int, not negative) of `table` [rows, ...], sharded by `out_names`.

    The gradient of a row is summed over its occurrences in float32: a bfloat16 sum over the thousands of occurrences of
    a frequent token would stop growing at 256 times one term. Differentiable in reverse mode only. Under `jax.vmap` the
    mapped axis stays sharded only with `spmd_axis_name`.

    Args:
      dtype: of the result; None: the dtype of the table.
      names: the logical names of the table's axes. If they are given, TPUs with a replicated table sum its gradient in
        the memory of one table instead of two (`_summed_by_device`), and devices with a part of its columns sum only
        these (`_summed_by_columns`).
    """
    dtype = table.dtype if dtype is None else dtype
    add = _sum
    if names is not None and on_tpu() and _only_rows_are_split(names, out_names, ids.ndim):
        add = functools.partial(_summed_by_device, names=names, out_names=out_names, mesh=same_mesh())
    elif names is not None and (at := _by_columns(names, out_names, ids.ndim)) is not None:
        add = functools.partial(_summed_by_columns, at=at)
    return constrain(_rows(table, ids, dtype, add), out_names)


_Add = Callable[[Sequence[int], jax.Array, jax.Array], jax.Array]  # `_sum`, or a function with the same result


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rows(table: jax.Array, ids: jax.Array, dtype: jnp.dtype, add: _Add) -> jax.Array:
    # Casting after the lookup would also sum in float32, but devices would then exchange float32 rows.
    return table.astype(dtype)[ids]


def _rows_forward(table: jax.Array, ids: jax.Array, dtype: jnp.dtype, add: _Add) -> Any:
    return _rows(table, ids, dtype, add), (table, ids)


def _rows_backward(dtype: jnp.dtype, add: _Add, kept: Any, cotangent: jax.Array) -> Any:
    table, ids = kept  # only the shape and dtype of the table are used
    # The compiler sorts the ids for this sum. Without the barrier it sorts them before the backward pass and keeps the
    # result through the whole pass.
    ids, cotangent = jax.lax.optimization_barrier((ids, cotangent))
    gradient = add(table.shape, ids, cotangent)
    # Without this barrier the compiler adds into the gradient of a tied head and all-gathers that gradient to do so.
    return jax.lax.optimization_barrier(gradient).astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def _sum(shape: Sequence[int], ids: jax.Array, rows: jax.Array, ordered: bool = False) -> jax.Array:
    """Returns a float32 array of `shape` that holds, at each index, the sum of the `rows` with that id."""
    return jnp.zeros(shape, jnp.float32).at[ids].add(rows.astype(jnp.float32), indices_are_sorted=ordered)


def _only_rows_are_split(names: Sequence[str | None], out_names: Sequence[str | None], ndim: int) -> bool:
    """Returns whether the ids, with `ndim` axes, are sharded over devices on which the table is replicated."""
    if _current.get() is None or jax.sharding.get_abstract_mesh().manual_axes:
        return False
    return _parts(out_names[:ndim]) > 1 == _parts(names) == _parts(out_names[ndim:])


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

    libtpu reduces a sum over ordered ids in place. For unordered ids it uses another kernel and reduces the result into
    a second float32 array of the table's size.

    `mesh`: makes the context of the forward pass (`same_mesh`), because JAX may trace the backward pass elsewhere.
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
    """Returns shardings of the ids and of the rows for `_summed_by_columns`, if mesh axes that shard the columns of the
    table shard the ids, too, and not alone; else None."""
    current = _current.get()
    if current is None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    mesh, rules = current
    columns = [axis for name in spec(names[1:], rules) for axis in axes_of(name)]
    rest = [[axis for axis in axes_of(name) if axis not in columns] for name in spec(out_names[:ndim], rules)]
    sizes = _parts(out_names[:ndim]), _parts(names[1:])
    others = math.prod(mesh.shape[axis] for axes in rest for axis in axes)
    whole = _parts(names[:1]) == 1 == _parts(out_names[ndim:])
    if not whole or others == 1 or sizes[1] == 1 or sizes[0] != others * sizes[1]:
        return None
    of_ids = [entry(axes) for axes in rest]
    of_rows = [*of_ids, *spec(names[1:], rules)]
    return NamedSharding(mesh, PartitionSpec(*of_ids)), NamedSharding(mesh, PartitionSpec(*of_rows))


def _summed_by_columns(
    shape: Sequence[int], ids: jax.Array, rows: jax.Array, *, at: tuple[NamedSharding, NamedSharding]
) -> jax.Array:
    """Returns the same as `_sum`: each device gets its columns of more rows, sums them, and reduces the result over the
    mesh axes that do not shard the columns. Without it, the compiler reduces the whole table on every device."""
    ids, rows = jax.tree.map(jax.lax.with_sharding_constraint, (ids, rows), at)
    return _sum(shape, ids, rows)


def shard_mapped(
    fn: Callable[..., Any], in_names: Any, out_names: Any, *, over: Sequence[str] | None = None, check: bool = True
) -> Callable[..., Any]:
    """Returns a function that runs `fn` on each device with its shards of the arguments and assembles the results by
    `out_names`.

    Inside, `mesh_axes` gives the mesh axes of a logical name, for collectives. An NNX module in tree mode may be an
    argument: values that `fn` assigns to its Variables persist after the call, attributes that `fn` adds do not.
    Outside of `on_mesh` the result is `fn` itself.

    Args:
      in_names: a tuple with an entry for each positional argument. The entry of an array or a subtree is one `Axes`
        (like a PartitionSpec in `jax.shard_map`), or a tree of them. The entry of a module is one `Axes` for the whole
        module, or a module with `Axes` in place of its Variables.
      out_names: the same for the result.
      over: logical names whose mesh axes are manual in `fn`; the compiler shards the other axes as usual. None: all
        mesh axes are manual.
      check: False for kernels and custom backward passes, such as the one of `take`. JAX cannot tell whether their
        results are equal on all devices; with False it trusts `out_names` and the names of the Variables that `fn`
        assigns.

    Raises:
      ValueError: at the call, if a Variable occurs twice in the arguments, or if a result or an assigned Variable may
        differ between devices on which its names say that it is replicated.
      UserError: a name has no rule.
    """
    current = _current.get()
    if current is None:
        return fn
    mesh, rules = current
    mapped = rules.get(MAPPED, ())
    if over is None:
        manual = set(mesh.axis_names)
    else:
        manual = {axis for name in over for axis in axes_of(spec([name], rules)[0])}
        if not manual:  # JAX reads an empty set as all axes
            return fn
        rules = {name: tuple(axis for axis in axes if axis in manual) for name, axes in rules.items()}
        manual.update(mapped)  # JAX's vmap rule shards the mapped axis, which is possible only for a manual mesh axis

    def specs(names: Any) -> Any:
        return jax.tree.map(lambda axes: spec(axes, rules), names, is_leaf=lambda node: isinstance(node, Axes))

    return nnx.shard_map(
        fn,
        mesh=mesh,
        in_specs=specs(in_names),
        out_specs=specs(out_names),
        axis_names=manual,
        check_vma=check,
        graph=False,
        graph_updates=False,
    )

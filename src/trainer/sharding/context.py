"""The helpers by which layers reach the mesh. Those that place arrays take logical names only.

Outside of `on_mesh` they place nothing, so that a layer works in a notebook.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from trainer.sharding.rules import Axes, Rules, named_sharding, spec

_current: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar("mesh and rules", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """What is traced inside places its arrays on `mesh` by `rules`."""
    with _placing((mesh, rules)):
        yield


@contextlib.contextmanager
def off_mesh() -> Iterator[None]:
    """What is traced inside places nothing: shapes of an initialization, say, that no mesh need divide."""
    with _placing(None):
        yield


@contextlib.contextmanager
def _placing(where: tuple[Mesh, Rules] | None) -> Iterator[None]:
    token = _current.set(where)
    try:
        yield
    finally:
        _current.reset(token)


def on_tpu() -> bool:
    """Whether what is traced will run on TPUs: those of the mesh or, outside of `on_mesh`, JAX's default devices."""
    current = _current.get()
    return (current[0].devices.flat[0].platform if current else jax.default_backend()) == "tpu"


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """`x`, placed by the logical name of each of its axes.

    Raises:
      UserError: see `rules.named_sharding`.
    """
    current = _current.get()
    if current is None:
        return x
    mesh, rules = current
    return jax.lax.with_sharding_constraint(x, named_sharding(mesh, names, x.shape, rules))


def settle_gradient(x: jax.Array, matrix: jax.Array, names: Sequence[str | None]) -> tuple[jax.Array, jax.Array]:
    """`x` and `matrix`, unchanged, for their product. In the backward pass the gradient of `matrix`, whose axes are
    called `names`, is summed over devices and placed as the matrix is before anything goes on from `x`.

    For a large matrix at the end of a model: the compiler else sums its gradient late, together with others, and the
    whole of it waits through the backward pass of all layers.
    """
    current = _current.get()
    if current is None:
        return x, matrix
    mesh, rules = current
    return _settled(x, matrix, named_sharding(mesh, names, matrix.shape, rules))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _settled(x: jax.Array, matrix: jax.Array, at: NamedSharding) -> tuple[jax.Array, jax.Array]:
    return x, matrix


def _settled_forward(x: jax.Array, matrix: jax.Array, at: NamedSharding) -> Any:
    return (x, matrix), None


def _settled_backward(at: NamedSharding, _: None, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    x_bar, matrix_bar = cotangents
    return jax.lax.optimization_barrier((x_bar, jax.lax.with_sharding_constraint(matrix_bar, at)))


_settled.defvjp(_settled_forward, _settled_backward)


def take(
    table: jax.Array, ids: jax.Array, out_names: Sequence[str | None], dtype: jnp.dtype | None = None
) -> jax.Array:
    """Rows `ids` (any shape, int) of `table` [rows, ...] in `dtype` (None: the table's), placed by `out_names`.

    The gradient of a row is summed over its occurrences in float32: the thousands of a frequent token's, one after the
    other in bfloat16, would stop growing at 256 times the size of one. Differentiable in reverse mode only.
    """
    return constrain(_rows(table, ids, table.dtype if dtype is None else dtype), out_names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # Rows of a float32 table, cast after the fact, would have such a sum too, and travel between devices in float32.
    return table.astype(dtype)[ids]


def _rows_forward(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> Any:
    return _rows(table, ids, dtype), (table, ids)


def _rows_backward(dtype: jnp.dtype, kept: Any, cotangent: jax.Array) -> Any:
    table, ids = kept  # of the table only shape and dtype are used
    # The compiler sorts the ids for this sum; untied, it does so before the backward pass, and holds them through it.
    ids, cotangent = jax.lax.optimization_barrier((ids, cotangent))
    gradient = jnp.zeros(table.shape, jnp.float32).at[ids].add(cotangent.astype(jnp.float32))
    # The compiler else begins this sum with a tied head's gradient, for which it gathers that, whole.
    return jax.lax.optimization_barrier(gradient).astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def shard_mapped(fn: Callable[..., Any], in_names: Any, out_names: Any, *, check: bool = True) -> Callable[..., Any]:
    """`fn`, run on each device with that device's part of its arguments, and made whole again by `out_names`.

    `in_names` (a tuple, one entry per positional argument) and `out_names` hold `Axes`, each of which stands for the
    array or the whole subtree in its place, as PartitionSpecs do in `jax.shard_map`. An NNX module in tree mode may be
    an argument: with one `Axes` for all of it, or as a module that holds `Axes` in place of its Variables. What `fn`
    sets in its Variables is set when the call returns; attributes that it adds are not. `check=False` is for kernels,
    whose results JAX can not tell to be equal on all devices: it then believes `out_names`, and the names of Variables
    that `fn` sets. Outside of `on_mesh` this is `fn` itself.

    Raises:
      ValueError: at the call: a Variable is in two places of the arguments; or a result, or an update of a Variable,
        may differ between devices on which it is the same according to its names.
    """
    current = _current.get()
    if current is None:
        return fn
    mesh, rules = current

    def specs(names: Any) -> Any:
        return jax.tree.map(lambda axes: spec(axes, rules), names, is_leaf=lambda node: isinstance(node, Axes))

    return nnx.shard_map(
        fn,
        mesh=mesh,
        in_specs=specs(in_names),
        out_specs=specs(out_names),
        check_vma=check,
        graph=False,
        graph_updates=False,
    )

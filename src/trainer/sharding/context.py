"""The helpers by which layers reach the mesh. They take logical names only.

Outside of `on_mesh` each of them is the plain operation, so that a layer works in a notebook.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from trainer.sharding.rules import Axes, Rules, named_sharding, spec

_current: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar("mesh and rules", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """What is traced inside places its arrays on `mesh` by `rules`."""
    token = _current.set((mesh, rules))
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def off_mesh() -> Iterator[None]:
    """What is traced inside places nothing, as for an initialization of which only names and shapes are wanted."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


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


def take(table: jax.Array, ids: jax.Array, out_names: Sequence[str | None]) -> jax.Array:
    """Rows `ids` (any shape, int) of `table` [rows, ...], placed by `out_names`."""
    return constrain(table[ids], out_names)


def shard_mapped(fn: Callable[..., Any], in_names: Any, out_names: Any, *, check: bool = True) -> Callable[..., Any]:
    """`fn`, run on each device with that device's part of its arguments, and made whole again by `out_names`.

    `in_names` (a tuple, one entry per positional argument) and `out_names` hold `Axes`, each of which stands for the
    array or the whole subtree in its place, as PartitionSpecs do in `jax.shard_map`. An NNX module in tree mode may be
    an argument: with one `Axes` for all of it, or as a module that holds `Axes` in place of its Variables. What `fn`
    sets in its Variables is set when the call returns. `check=False` is for kernels, whose results JAX can not tell to
    be equal on all devices: it then believes `out_names`, and the names of Variables that `fn` sets.
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

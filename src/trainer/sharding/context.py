"""The helpers by which layers reach the mesh. They take logical names only.

Outside of `on_mesh` each of them is the plain operation, so that a layer works in a notebook.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from trainer.sharding.rules import Rules, spec

_current: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar("mesh and rules", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """What is traced inside places its arrays on `mesh` by `rules`."""
    token = _current.set((mesh, rules))
    try:
        yield
    finally:
        _current.reset(token)


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """`x`, placed by the logical name of each of its axes."""
    current = _current.get()
    if current is None:
        return x
    mesh, rules = current
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(names, rules)))


def take(table: jax.Array, ids: jax.Array, out_names: Sequence[str | None]) -> jax.Array:
    """Rows `ids` (any shape, int) of `table` [rows, ...], placed by `out_names`."""
    return constrain(table[ids], out_names)

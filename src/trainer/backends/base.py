"""What a backend is."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trainer.backends.codec import Path
from trainer.layers.sown import Sown
from trainer.models.init import init_variables


class TrainTree(NamedTuple):
    """A train state in canonical form, the same for every combination.

    `params` and `rest` are nested dicts of canonical names; `opt_state` is optax's own structure over `params`; `rest`
    is state that no gradient touches. Leaves may be arrays or whatever stands for them (see `Codec`).
    """

    step: Any
    params: Any
    opt_state: Any
    rest: Any


class Backend(Protocol):
    """One combination's model and codec."""

    param_axes: Any  # the tree of params, with a `sharding.Axes` at each leaf

    def init(self, key: jax.Array, params: Any = None) -> Any:
        """The native train state at step 0, with `params`, or with parameters drawn from `key`.

        The same key gives the same parameters in every combination.
        """

    def unpack(self, native: Any) -> TrainTree:
        """The canonical form of a native train state: a permutation of its leaves."""

    def pack(self, tree: TrainTree) -> Any:
        """The inverse of `unpack`."""

    def canonical(self, path: Path) -> Path:
        """Where in a TrainTree the leaf at `path` of a native train state lies, whatever its optimizer."""

    def apply(
        self,
        params: Any,
        rest: Any,
        *inputs: Any,
        method: str = "hidden",
        capture: tuple[type[nnx.Variable], ...] = (),
        cache: Any = None,
        key: jax.Array | None = None,
    ) -> tuple[Any, Sown, Any]:
        """Run the model: (result, what was sown of the types in `capture`, the new cache).

        `method` is "hidden" (inputs: tokens, positions, segments, row, see `models.transformer`) or "head" (inputs:
        hidden states; the output head alone).
        """


def initial_tree(config, tx: optax.GradientTransformation, key: jax.Array, params: Any) -> TrainTree:
    """What `Backend.init` packs."""
    drawn, rest = init_variables(config, key)
    params = drawn if params is None else params
    return TrainTree(jnp.zeros((), jnp.int32), params, tx.init(params), rest)


@contextlib.contextmanager
def tree_mode() -> Iterator[None]:
    """NNX modules as plain pytrees, with logical axis names that need no mesh."""
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False), nnx.use_eager_sharding(False):
        yield

"""The interface of a model, and the train state of a model and an optimizer."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trainer.backends.permutation import Path, Permutation
from trainer.config.keys import Config
from trainer.layers.sown import Sown
from trainer.optim.schedule import on_schedule


class TrainTree(NamedTuple):
    """A train state in canonical form, which is the same for every combination of the flags that select NNX or Linen.

    `params` and `rest` are nested dicts with canonical names as keys. `rest` contains the model's state that has no
    gradients. `opt_state` has optax's structure for `params`. Leaves may be arrays or placeholders for arrays (see
    `Permutation`).
    """

    step: Any
    params: Any
    opt_state: Any
    rest: Any


class Model(Protocol):
    """The model of one combination of the flags that select NNX or Linen, made from a resolved configuration."""

    config: Config
    # Trees like params and rest, with a `sharding.Axes` for each array. A parameter may itself be a pytree of arrays.
    param_axes: Any
    rest_axes: Any
    abstract: tuple[Any, Any]  # the result of `init` with a ShapeDtypeStruct at each leaf

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Returns the initial (params, rest), nested dicts with canonical names as keys.

        The values depend on `key`, but not on the combination of flags.
        """

    def apply(
        self,
        params: Any,
        rest: Any,
        *inputs: Any,
        method: str = "hidden",
        capture: tuple[type[nnx.Variable], ...] = (),
        cache: Any = None,
        key: jax.Array | None = None,
        sampled: jax.Array | None = None,
        ranks: jax.Array | None = None,
        ahead: Any = None,
    ) -> tuple[Any, Sown, Any]:
        """Runs the model and returns (result, the sown values of the types in `capture`, the new cache).

        `method` is "hidden" or "head". The `inputs` of "hidden" are tokens, positions, segments and row (see
        `models.transformer`). "head" runs only the output head; its only input is the hidden states. `cache`, `key`,
        `sampled`, `ranks` and `ahead` are passed only to "hidden".
        """

    def abstract_train_state(self, tx: optax.GradientTransformation) -> Any:
        """Returns the native train state for the optimizer `tx`, as ShapeDtypeStructs. Nothing is allocated."""

    def canonical(self, path: Path) -> Path:
        """Returns the path in a TrainTree of the leaf that is at `path` in a native train state, for any optimizer."""


class Codec(Protocol):
    """Converts a train state between its native and its canonical form.

    `StateCodec` and DiLoCo's codec (`state.diloco`) implement this interface. A canonical state has at least the fields
    `params` and `step`.
    """

    model: Model
    abstract: Any  # the native train state: a ShapeDtypeStruct at each leaf

    def init(self, key: jax.Array, params: Any = None, rest: Any = None, step: Any = None) -> Any:
        """Returns a native train state with a new optimizer state; see `StateCodec.init`."""

    def unpack(self, native: Any) -> Any:
        """Returns the canonical form of a native train state: a permutation of its leaves."""

    def pack(self, tree: Any) -> Any:
        """Returns the native train state whose canonical form is `tree`."""


class StateCodec:
    """Converts the train state of a model and an optimizer between its native form and a `TrainTree`. `abstract`
    is the native train state with a ShapeDtypeStruct at each leaf."""

    def __init__(self, model: Model, tx: optax.GradientTransformation):
        self.model = model
        self.tx = tx
        params, rest = model.abstract
        step = jax.ShapeDtypeStruct((), jnp.int32)
        tree = TrainTree(step, params, jax.eval_shape(tx.init, params), rest)
        self.abstract = model.abstract_train_state(tx)
        self._leaves = Permutation(self.abstract, tree, model.canonical)

    def init(self, key: jax.Array, params: Any = None, rest: Any = None, step: Any = None) -> Any:
        """Returns a native train state with a new optimizer state.

        The state contains the canonical `params`, cast to the model's dtypes, and `rest`. If `params` or `rest` is
        None, the model initializes it with `key`. If `step` is given, the state and the learning-rate schedule continue
        at that step; all other state of the optimizer and of the update rules has its initial value.
        """
        abstract, initial = self.model.abstract
        drawn = None
        if params is None or (rest is None and jax.tree.leaves(initial)):
            drawn, initial = self.model.init(key)
        params = drawn if params is None else jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)
        rest = initial if rest is None else rest
        opt_state = self.tx.init(params)
        if step is not None:
            opt_state = on_schedule(opt_state, lambda count: step)
        return self.pack(TrainTree(jnp.zeros((), jnp.int32) if step is None else step, params, opt_state, rest))

    def unpack(self, native: Any) -> TrainTree:
        """Returns the canonical form of a native train state: a permutation of its leaves."""
        return self._leaves.unpack(native)

    def pack(self, tree: TrainTree) -> Any:
        """Returns the native train state whose canonical form is `tree`."""
        return self._leaves.pack(tree)


@contextlib.contextmanager
def tree_mode() -> Iterator[None]:
    """A context in which NNX modules are plain pytrees, and in which logical axis names can be used without a mesh."""
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False), nnx.use_eager_sharding(False):
        yield

"""The train state of DiLoCo (arXiv:2311.08105): a train state for each island, and the outer parameters.

Each leaf of `inner_state` has a leading axis of islands, sharded over the mesh axis diloco. The outer parameters and
the outer optimizer have no such axis: they are replicated over diloco, and sharded over the other mesh axes as an
island's parameters are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.backends import StateCodec, TrainTree
from trainer.config.derived import islands
from trainer.config.diloco_keys import schedule
from trainer.models.families import axis_rules
from trainer.ops.paths import by_path, path_of
from trainer.optim.outer import make_outer_optimizer
from trainer.sharding import Axes
from trainer.state.builders import AbstractState, get_partition_spec_nnx, set_named_sharding_nnx
from trainer.state.host import storage_shardings
from trainer.state.shardings import Tensor, state_shardings, tensors

AXIS = "diloco"  # of the mesh
INNER = "inner_state"


class DiLoCoTrainState(NamedTuple):
    """A train state of DiLoCo. In the canonical form `inner_state` is a `TrainTree`, in the native form the native
    train state of the combination."""

    inner_state: Any  # the islands' train states, each leaf [islands, ...]
    params: Any  # the outer parameters, a nested dict of canonical names
    outer_opt_state: Any  # of the outer optimizer: optax's structure over `params`
    step: Any  # int32 []
    # int32 [], if islands take a fragment some updates after it synchronizes: the update after which the fragment that
    # they have not taken yet synchronized, or 0 if there is none. The outer parameters hold its new values.
    in_flight: Any = None


class DiLoCoCodec:
    """Converts between the native and the canonical form of a `DiLoCoTrainState`; has the methods of a `StateCodec`.

    Attributes:
      inner: the codec of an island's train state.
      abstract: the native state, a ShapeDtypeStruct at each leaf.
    """

    def __init__(self, inner: StateCodec, outer: optax.GradientTransformation, count: int, *, delayed: bool):
        """`outer`: the outer optimizer; `count`: the number of islands; `delayed`: the state has `in_flight`."""
        self.inner, self.model = inner, inner.model
        self._outer, self._count, self._delayed = outer, count, delayed
        self.abstract = jax.eval_shape(lambda tree: self.pack(self.broadcast(tree)), inner.unpack(inner.abstract))

    def init(self, key: jax.Array, params: Any = None) -> DiLoCoTrainState:
        """See `StateCodec.init`. Every island begins with the outer parameters."""
        return self.pack(self.broadcast(self.inner.unpack(self.inner.init(key, params))))

    def broadcast(self, tree: TrainTree) -> DiLoCoTrainState:
        """The canonical state in which every island has the train state `tree`, with a fresh outer optimizer."""
        inner = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self._count, *leaf.shape)), tree)
        in_flight = jnp.zeros([], jnp.int32) if self._delayed else None
        return DiLoCoTrainState(inner, tree.params, self._outer.init(tree.params), tree.step, in_flight)

    def unpack(self, native: DiLoCoTrainState) -> DiLoCoTrainState:
        """The canonical form of a native state: a permutation of its leaves.

        Raises:
          ValueError: it is canonical already.
        """
        if isinstance(native.inner_state, TrainTree):
            raise ValueError("unpack: this DiLoCoTrainState is canonical already, its inner_state is a TrainTree")
        return native._replace(inner_state=self.inner.unpack(native.inner_state))

    def pack(self, tree: DiLoCoTrainState) -> DiLoCoTrainState:
        """The inverse of `unpack`.

        Raises:
          ValueError: the state is native already.
        """
        if not isinstance(tree.inner_state, TrainTree):
            kind = type(tree.inner_state).__name__
            raise ValueError(f"pack: this DiLoCoTrainState is native already, its inner_state is of type {kind}")
        return tree._replace(inner_state=self.inner.pack(tree.inner_state))


def make_diloco_codec(config: Any, inner: StateCodec) -> DiLoCoCodec:
    """The codec for the islands of `config`, resolved, whose train states are those of `inner`."""
    delayed = schedule(config).delay > 0
    return DiLoCoCodec(inner, make_outer_optimizer(config), islands(config), delayed=delayed)


def build_diloco_state(config: Any, codec: StateCodec, state: Any) -> DiLoCoTrainState:
    """The native DiLoCo state in which every island of `config`, resolved, has the native train state `state` of
    `codec`. Call it under jit to give the islands' leaves their shardings, those of `build_abstract_diloco_state`."""
    whole = make_diloco_codec(config, codec)
    return whole.pack(whole.broadcast(codec.unpack(state)))


def build_abstract_diloco_state(config: Any, codec: StateCodec, mesh: Mesh) -> AbstractState:
    """The abstract native DiLoCo state of `config`, resolved, its specs and its shardings between steps.

    Nothing is allocated.

    Raises:
      UserError: a tensor does not fit mesh and rules.
    """
    model, zero1 = codec.model, config.shard_optimizer_over_data
    on_device = state_shardings(model, codec.abstract, mesh, axis_rules(config), zero1=zero1)
    stored = storage_shardings(config, model, codec.abstract, on_device)
    abstract = make_diloco_codec(config, codec).abstract
    shardings = diloco_shardings(abstract, stored, codec.unpack(on_device).params)
    return AbstractState(set_named_sharding_nnx(abstract, shardings), get_partition_spec_nnx(shardings), shardings)


def diloco_shardings(abstract: DiLoCoTrainState, inner: Any, params: Any) -> DiLoCoTrainState:
    """The shardings of `abstract`, a DiLoCo state.

    Args:
      inner: those of an island's train state, a tree of its structure.
      params: those of the outer parameters.
    """
    replicated = NamedSharding(jax.tree.leaves(params)[0].mesh, PartitionSpec())
    outer = _like_parameters(abstract.outer_opt_state, params, lambda leaf: replicated)
    in_flight = jax.tree.map(lambda leaf: replicated, abstract.in_flight)
    return DiLoCoTrainState(jax.tree.map(over_islands, inner), params, outer, replicated, in_flight)


def over_islands(sharding: NamedSharding) -> NamedSharding:
    """The sharding of the same array of every island, with the axis of islands before its own."""
    return sharding.update(spec=PartitionSpec(AXIS, *sharding.spec))


def diloco_tensors(codec: DiLoCoCodec) -> DiLoCoTrainState:
    """A `Tensor` for every leaf of the native state of `codec`."""
    inner = jax.tree.map(
        lambda tensor: Tensor((INNER, *tensor.path), Axes((AXIS, *tensor.axes)), tensor.of_parameter),
        tensors(codec.model, codec.inner.abstract),
    )
    plain = codec.abstract._replace(inner_state=None)
    axes = _like_parameters(plain, codec.model.param_axes, lambda leaf: Axes((None,) * leaf.ndim))
    outer = jax.tree_util.tree_map_with_path(
        lambda path, names, leaf: Tensor(path_of(path), names, bool(leaf.ndim)), axes, plain
    )
    return outer._replace(inner_state=inner)


def _like_parameters(tree: Any, of_params: Any, other: Callable[[Any], Any]) -> Any:
    """`tree` with the leaves of `of_params` at the parameters and what an optimizer keeps for them, which have the
    path of a parameter as a suffix of their own; `other(leaf)` elsewhere."""
    found = by_path(of_params)

    def one(keypath: Any, leaf: Any) -> Any:
        path = path_of(keypath)
        owners = (path[start:] for start in range(len(path)))
        return next((found[owner] for owner in owners if owner in found), None) or other(leaf)

    return jax.tree_util.tree_map_with_path(one, tree)

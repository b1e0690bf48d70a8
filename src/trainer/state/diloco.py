"""The train state of DiLoCo (arXiv:2311.08105): one train state per island, and the outer parameters.

Each leaf of `inner_state` has a leading axis of islands, sharded over the mesh axis diloco. The outer parameters and
the outer optimizer state have no such axis. They are replicated over diloco, and sharded over the other mesh axes like
the parameters of one island.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.backends.base import StateCodec, TrainTree
from trainer.config.capabilities.diloco_keys import schedule
from trainer.config.derived import islands
from trainer.config.keys import Config
from trainer.models.families import axis_rules
from trainer.ops.paths import by_path, path_of
from trainer.optim.outer import make_outer_optimizer
from trainer.sharding import Axes
from trainer.state.builders import AbstractState, get_partition_spec_nnx, set_named_sharding_nnx
from trainer.state.host import storage_shardings
from trainer.state.shardings import Tensor, state_shardings, tensors

AXIS = "diloco"  # the mesh axis of islands
INNER = "inner_state"


class DiLoCoTrainState(NamedTuple):
    """A train state of DiLoCo. In canonical form, `inner_state` is a `TrainTree`; in native form, it is the
    islands' native train state."""

    inner_state: Any  # the islands' train states, each leaf [islands, ...]
    params: Any  # the outer parameters, a nested dict of canonical names; float32 where an island has bfloat16
    outer_opt_state: Any  # state of the outer optimizer: optax's structure over `params`
    step: Any  # int32 []
    # int32 []. With a synchronization delay, the islands merge a fragment of the parameters (`state.fragments`) some
    # updates after the update that synchronized the fragment. Until then, the fragment is pending: `in_flight` is the
    # number of the update that synchronized it, and the outer parameters already contain its new values. If no fragment
    # is pending, `in_flight` is 0. Without a delay, `in_flight` is None.
    in_flight: Any = None


@jax.jit
def mean_of_islands(leaf: jax.Array) -> jax.Array:
    """Returns the mean of an array of `TrainTree.rest` over its first axis, the islands; for an integer array, returns
    the first island's values.

    The mean is computed from the differences to the first island, so it is exact if all islands are equal.
    """
    first = leaf[0]
    return first + jnp.mean(leaf - first, 0) if jnp.issubdtype(leaf.dtype, jnp.floating) else first


def without_islands(tree: DiLoCoTrainState) -> tuple[Any, Any]:
    """Returns the outer parameters of a canonical state, and the islands' `rest` averaged over the islands."""
    return tree.params, jax.tree.map(mean_of_islands, tree.inner_state.rest)


def widened(params: Any) -> Any:
    """Returns parameters (arrays or ShapeDtypeStructs) in the dtypes of outer parameters: float32 for bfloat16."""

    def one(leaf: Any) -> Any:
        if leaf.dtype != jnp.bfloat16:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=jnp.float32)
        return jax.lax.optimization_barrier(leaf).astype(jnp.float32)  # else XLA removes a cast to bfloat16 and back

    return jax.tree.map(one, params)


def like_islands(count: int, tree: TrainTree) -> DiLoCoTrainState:
    """Returns the outer parameters, the step, and the `rest` of `count` islands as ShapeDtypeStructs, sharded as in
    `tree`.

    The `rest` is not sharded over islands: each device stores, for every island, its shard of the island's `rest`.
    """

    def of_each(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        sharding = leaf.sharding.update(spec=PartitionSpec(None, *leaf.sharding.spec))
        return jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype, sharding=sharding)

    inner = TrainTree(None, None, None, jax.tree.map(of_each, tree.rest))
    return DiLoCoTrainState(inner, widened(tree.params), None, tree.step)


class DiLoCoCodec:
    """Converts a `DiLoCoTrainState` between its native and its canonical form, with the methods of a `StateCodec`.

    Attributes:
      inner: the codec of an island's train state.
      abstract: the native state, with a ShapeDtypeStruct at each leaf.
    """

    def __init__(self, inner: StateCodec, outer: optax.GradientTransformation, count: int, *, delayed: bool):
        """`outer`: the outer optimizer. `count`: the number of islands. `delayed`: whether `in_flight` is used."""
        self.inner, self.model = inner, inner.model
        self._outer, self._count, self._delayed = outer, count, delayed
        self.abstract = jax.eval_shape(lambda tree: self.pack(self.broadcast(tree)), inner.unpack(inner.abstract))

    def init(self, key: jax.Array, params: Any = None, rest: Any = None, step: Any = None) -> DiLoCoTrainState:
        """See `StateCodec.init`. Every island starts from the outer parameters."""
        return self.pack(self.broadcast(self.inner.unpack(self.inner.init(key, params, rest, step)), params))

    def broadcast(self, tree: TrainTree, outer: Any = None) -> DiLoCoTrainState:
        """Returns the canonical state in which every island has the train state `tree`, with a new outer optimizer
        state. `outer`: the outer parameters, needed if those in `tree` are rounded; default: those in `tree`."""
        inner = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self._count, *leaf.shape)), tree)
        in_flight = jnp.zeros([], jnp.int32) if self._delayed else None
        outer = widened(tree.params if outer is None else outer)
        return DiLoCoTrainState(inner, outer, self._outer.init(outer), tree.step, in_flight)

    def weights(self, tree: DiLoCoTrainState) -> tuple[Any, Any]:
        """Returns the result of `without_islands`, with the parameters cast to the dtypes of the model."""
        params, rest = without_islands(tree)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, self.model.abstract[0]), rest

    def unpack(self, native: DiLoCoTrainState) -> DiLoCoTrainState:
        """Converts a native state to the canonical form by reordering leaves. Raises ValueError if the
        state is already canonical."""
        if isinstance(native.inner_state, TrainTree):
            raise ValueError("unpack: this DiLoCoTrainState is already canonical: its inner_state is a TrainTree")
        return native._replace(inner_state=self.inner.unpack(native.inner_state))

    def pack(self, tree: DiLoCoTrainState) -> DiLoCoTrainState:
        """Returns the inverse of `unpack`.

        Raises:
          ValueError: the state is already native.
        """
        if not isinstance(tree.inner_state, TrainTree):
            kind = type(tree.inner_state).__name__
            raise ValueError(f"pack: this DiLoCoTrainState is already native: its inner_state is of type {kind}")
        return tree._replace(inner_state=self.inner.pack(tree.inner_state))


def make_diloco_codec(config: Config, inner: StateCodec) -> DiLoCoCodec:
    """Returns the codec for all islands of the resolved `config`. `inner`: the codec of one island's train state."""
    delayed = schedule(config).delay > 0
    return DiLoCoCodec(inner, make_outer_optimizer(config), islands(config), delayed=delayed)


def build_diloco_state(config: Config, codec: StateCodec, state: Any) -> DiLoCoTrainState:
    """Returns the native DiLoCo state in which every island of the resolved `config` has the native state `state`.

    `codec` is the codec of `state`. Call this function under jit, with `out_shardings` set to the shardings of
    `build_abstract_diloco_state`.
    """
    whole = make_diloco_codec(config, codec)
    return whole.pack(whole.broadcast(codec.unpack(state)))


def build_abstract_diloco_state(config: Config, codec: StateCodec, mesh: Mesh) -> AbstractState:
    """Returns the abstract native DiLoCo state of the resolved `config`, with its specs and storage shardings.

    Nothing is allocated.

    Raises:
      UserError: the shape of a tensor does not fit the mesh and the rules.
    """
    model, zero1 = codec.model, config.shard_optimizer_over_data
    on_device = state_shardings(model, codec.abstract, mesh, axis_rules(config), zero1=zero1)
    stored = storage_shardings(config, model, codec.abstract, on_device)
    abstract = make_diloco_codec(config, codec).abstract
    shardings = diloco_shardings(abstract, stored, codec.unpack(on_device).params)
    return AbstractState(set_named_sharding_nnx(abstract, shardings), get_partition_spec_nnx(shardings), shardings)


def diloco_shardings(abstract: DiLoCoTrainState, inner: Any, params: Any) -> DiLoCoTrainState:
    """Returns the shardings of `abstract`, a DiLoCo state.

    Args:
      inner: the shardings of one island's train state, a tree with its structure.
      params: the shardings of the outer parameters.
    """
    replicated = NamedSharding(jax.tree.leaves(params)[0].mesh, PartitionSpec())
    outer = _like_parameters(abstract.outer_opt_state, params, lambda leaf: replicated)
    in_flight = jax.tree.map(lambda leaf: replicated, abstract.in_flight)
    return DiLoCoTrainState(jax.tree.map(over_islands, inner), params, outer, replicated, in_flight)


def over_islands(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of one island's array, extended by a leading axis of islands."""
    return sharding.update(spec=PartitionSpec(AXIS, *sharding.spec))


def diloco_tensors(codec: DiLoCoCodec) -> DiLoCoTrainState:
    """Returns a `Tensor` for every leaf of the native state of `codec`."""
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
    """Returns `tree` with each parameter and its optimizer state replaced by the parameter's leaf in `of_params`.

    The path of a parameter's optimizer state ends with the path of the parameter. Other leaves become `other(leaf)`.
    """
    found = by_path(of_params)

    def one(keypath: Any, leaf: Any) -> Any:
        path = path_of(keypath)
        owners = (path[start:] for start in range(len(path)))
        return next((found[owner] for owner in owners if owner in found), None) or other(leaf)

    return jax.tree_util.tree_map_with_path(one, tree)

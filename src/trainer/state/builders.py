"""Trees of shapes, shardings and specs for a native train state, under MaxText's names.

Each of these trees has exactly the structure of its state, so that any two of them can be zipped with `jax.tree.map`.
docs/guides/state-sharding.md explains this.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from trainer.backends import make_model
from trainer.backends.base import tree_mode
from trainer.config import UserError, resolve
from trainer.models.families import axis_rules
from trainer.ops.paths import path_of
from trainer.sharding import slice_count
from trainer.state.host import storage_shardings
from trainer.state.shardings import state_shardings


class AbstractState(NamedTuple):
    """Three trees of one structure."""

    state: Any  # ShapeDtypeStructs that carry their shardings
    specs: Any  # PartitionSpecs
    shardings: Any  # NamedShardings


def get_abstract_state_nnx(
    config: Any, mesh: Mesh, init_fn: Callable[[], Any], is_training: bool = True
) -> AbstractState:
    """The abstract train state of `init_fn`, sharded over `mesh` by the rules of `config`. Nothing is allocated.

    Args:
      config: resolved or not; its combination must be that of the state.
      mesh: from `get_mesh_from_config`.
      init_fn: without arguments; returns a native train state: an `nnx.State`, a `TrainStateNNX`, which is split, or a
        Linen `TrainState`, with any optimizer. `init_state_fn(codec)` is one.
      is_training: False for the sharding in evaluation and sampling: shard_optimizer_over_data and offloading to the
        host have no effect, and the state may have no optimizer.

    Raises:
      UserError: a tensor does not fit mesh and rules.
    """
    config = _resolved(config, mesh)
    with tree_mode():
        abstract = jax.eval_shape(init_fn)
        if isinstance(abstract, nnx.Module):
            abstract = nnx.state(abstract)
    model = make_model(config)
    shardings = state_shardings(
        model,
        abstract,
        mesh,
        axis_rules(config),
        zero1=is_training and config.shard_optimizer_over_data,
    )
    if is_training:
        shardings = storage_shardings(config, model, abstract, shardings)
    return AbstractState(set_named_sharding_nnx(abstract, shardings), get_partition_spec_nnx(shardings), shardings)


def get_named_sharding_nnx(abstract_state: Any) -> Any:
    """The shardings of the leaves of `abstract_state`, arrays or ShapeDtypeStructs.

    Raises:
      UserError: a leaf has no sharding.
    """

    def one(path: Any, leaf: Any) -> Any:
        if getattr(leaf, "sharding", None) is None:
            name = jax.tree_util.keystr(path)
            raise UserError(f"{name} carries no sharding: see get_abstract_state_nnx and set_named_sharding_nnx")
        return leaf.sharding

    return jax.tree_util.tree_map_with_path(one, abstract_state)


def set_named_sharding_nnx(abstract_state: Any, named_sharding: Any) -> Any:
    """`abstract_state` as ShapeDtypeStructs with the shardings of `named_sharding`, a tree of its structure."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_state,
        named_sharding,
    )


def get_partition_spec_nnx(named_sharding: Any) -> Any:
    """The PartitionSpec of each sharding of a tree."""
    return jax.tree.map(lambda sharding: sharding.spec, named_sharding)


def build_zero1_input_state_mesh_shardings(config: Any, state_mesh_shardings: Any, params_shardings: Any) -> Any:
    """The compute shardings of a Zero-1 step: parameters gathered over data, the rest as in storage.

    Args:
      config: resolved or not; its combination must be that of the state.
      state_mesh_shardings: the storage shardings of a native train state.
      params_shardings: the compute shardings of its parameters: a nested dict of canonical names (of a `TrainTree`, or
        the `params` of a Linen TrainState), or an `nnx.State` of Params.

    Returns:
      a copy of `state_mesh_shardings` with `params_shardings` for its parameters.

    Raises:
      UserError: the two do not hold the same parameters.
    """
    mesh = jax.tree.leaves(state_mesh_shardings)[0].mesh
    model = make_model(_resolved(config, mesh))
    is_state = isinstance(params_shardings, nnx.State)
    leaves = jax.tree_util.tree_leaves_with_path(params_shardings)
    given = {path_of(keypath)[: -1 if is_state else None]: leaf for keypath, leaf in leaves}
    unseen = set(given)

    def one(keypath: Any, sharding: Any) -> Any:
        root, *names = model.canonical(path_of(keypath))
        if root != "params":
            return sharding
        unseen.discard(tuple(names))
        if tuple(names) not in given:
            raise UserError(f"params_shardings lacks the parameter {'/'.join(names)}")
        return given[tuple(names)]

    overlaid = jax.tree_util.tree_map_with_path(one, state_mesh_shardings)
    if unseen:
        raise UserError(f"params_shardings holds what the state does not: {', '.join(map('/'.join, sorted(unseen)))}")
    return overlaid


def _resolved(config: Any, mesh: Mesh) -> Any:
    devices = mesh.devices.ravel().tolist()
    return resolve(config, device_count=len(devices), platform=devices[0].platform, num_slices=slice_count(devices))

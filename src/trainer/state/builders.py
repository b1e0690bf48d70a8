"""Trees of shapes, shardings and specs for a native train state, that is, one in NNX's or Linen's format.

The functions have the names of MaxText's functions. Each tree has exactly the structure of the state, so `jax.tree.map`
can zip any two of them.
See docs/guides/state-sharding.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from trainer.backends.base import tree_mode
from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.models.families import axis_rules
from trainer.ops.paths import by_path, path_of
from trainer.sharding import hardware
from trainer.state.host import storage_shardings
from trainer.state.shardings import state_shardings


class AbstractState(NamedTuple):
    """Three trees with the same structure."""

    state: Any  # ShapeDtypeStructs with their shardings
    specs: Any  # PartitionSpecs
    shardings: Any  # NamedShardings


def get_abstract_state_nnx(
    config: Config, mesh: Mesh, init_fn: Callable[[], Any], is_training: bool = True
) -> AbstractState:
    """Returns the abstract train state of `init_fn`, sharded over `mesh` by the rules of `config`.

    Nothing is allocated.

    Args:
      config: resolved or not. Its flags for NNX or Linen must match the state.
      mesh: from `get_mesh_from_config`.
      init_fn: takes no arguments and returns a native train state with any optimizer: an `nnx.State`, a
        `TrainStateNNX` (its `nnx.State` is used), or a Linen `TrainState`. `state.init.init_state_fn(codec)` returns
        a suitable function.
      is_training: if False, returns the shardings for evaluation and sampling: shard_optimizer_over_data and host
        offloading have no effect, and the state may lack an optimizer.

    Raises:
      UserError: the shape of a tensor does not fit the mesh and the rules.
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
    """Returns the sharding of each leaf of `abstract_state`, a tree. Raises UserError if a leaf has no sharding."""

    def one(path: Any, leaf: Any) -> Any:
        if getattr(leaf, "sharding", None) is None:
            name = jax.tree_util.keystr(path)
            raise UserError(f"{name} has no sharding; set it with get_abstract_state_nnx or set_named_sharding_nnx")
        return leaf.sharding

    return jax.tree_util.tree_map_with_path(one, abstract_state)


def set_named_sharding_nnx(abstract_state: Any, named_sharding: Any) -> Any:
    """Returns `abstract_state` as ShapeDtypeStructs with the shardings of `named_sharding`, a tree of the same
    structure."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_state,
        named_sharding,
    )


def get_partition_spec_nnx(named_sharding: Any) -> Any:
    """Returns the PartitionSpec of each sharding in a tree."""
    return jax.tree.map(lambda sharding: sharding.spec, named_sharding)


def build_zero1_input_state_mesh_shardings(config: Config, state_mesh_shardings: Any, params_shardings: Any) -> Any:
    """Returns the compute shardings of a Zero-1 step: the parameters are all-gathered over the mesh axis data, and
    everything else has its storage sharding.

    Args:
      config: resolved or not. Its flags for NNX or Linen must match the state.
      state_mesh_shardings: the storage shardings of a native train state.
      params_shardings: the compute shardings of its parameters: a nested dict of canonical names (the `params` of a
        `TrainTree` or of a Linen TrainState), or an `nnx.State` of Params.

    Returns:
      A copy of `state_mesh_shardings`, with the shardings of the parameters replaced by `params_shardings`.

    Raises:
      UserError: the two trees do not have the same parameters.
    """
    mesh = jax.tree.leaves(state_mesh_shardings)[0].mesh
    model = make_model(_resolved(config, mesh))
    given = by_path(params_shardings)
    if isinstance(params_shardings, nnx.State):
        given = {model.canonical(("model", *path))[1:]: leaf for path, leaf in given.items()}
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
        raise UserError(f"params_shardings has unknown parameters: {', '.join(map('/'.join, sorted(unseen)))}")
    return overlaid


def _resolved(config: Config, mesh: Mesh) -> Any:
    return resolve(config, **hardware(mesh.devices.ravel().tolist()))

"""The shardings of a train state, found by path over the TrainTree and so the same for every combination."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from trainer.backends import Backend, TrainTree
from trainer.backends.codec import Path, path_of
from trainer.ops.random import seed_key
from trainer.sharding import Axes, Rules, spec


def logical_axes(backend: Backend, tree: TrainTree) -> TrainTree:
    """The logical axis names of every leaf of `tree`, at its place.

    A leaf of the optimizer's state belongs to the parameter whose path its own ends with, if they have one shape: that
    is how optax lays out moments, whatever it wraps around them. Other leaves have no names and are replicated.
    """
    axes_of, params = _by_path(backend.param_axes), _by_path(tree.params)

    def optimizer_axes(keypath: Any, leaf: Any) -> Axes:
        path = path_of(keypath)
        for start in range(len(path)):
            param = params.get(path[start:])
            if param is not None and param.shape == leaf.shape:
                return axes_of[path[start:]]
        return Axes((None,) * leaf.ndim)

    return TrainTree(
        step=Axes(),
        params=jax.tree.map(lambda axes, _: axes, backend.param_axes, tree.params),
        opt_state=jax.tree_util.tree_map_with_path(optimizer_axes, tree.opt_state),
        rest=jax.tree.map(lambda leaf: Axes((None,) * leaf.ndim), tree.rest),
    )


def abstract_state(backend: Backend) -> Any:
    """The native train state with a ShapeDtypeStruct at each leaf. Nothing is allocated."""
    return jax.eval_shape(backend.init, seed_key(0))


def state_shardings(backend: Backend, abstract: Any, mesh: Mesh, rules: Rules) -> Any:
    """The NamedSharding of every leaf of `abstract`, a native train state, in a tree of exactly its structure."""
    tree = backend.unpack(abstract)
    return backend.pack(
        jax.tree.map(lambda axes: NamedSharding(mesh, spec(axes, rules)), logical_axes(backend, tree)),
    )


def _by_path(tree: Any) -> dict[Path, Any]:
    return {path_of(keypath): leaf for keypath, leaf in jax.tree_util.tree_leaves_with_path(tree)}

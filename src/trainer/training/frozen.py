"""The arrays that a step reads and never changes (`objectives.Frozen`), on the devices of a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from trainer.objectives import Objective
from trainer.objectives.base import frozen_of
from trainer.ops.paths import path_of
from trainer.sharding import Rules, named_sharding
from trainer.state import Tensor


class FrozenArrays(NamedTuple):
    """The argument `frozen` of a step: one pytree, which is not donated, differentiated, selected, mapped over islands
    or saved. It is () unless the objective declares it."""

    abstract: Any = ()  # shapes with shardings
    tensors: Any = ()  # a `state.Tensor` for every leaf
    make: Callable[[], Any] = tuple  # returns the arrays; called once at the beginning of each process


def frozen_arrays(objective: Objective, mesh: Mesh, rules: Rules) -> FrozenArrays:
    """Returns what `objective` declares, with the shardings that `rules` give.

    Raises:
      UserError: the shape of an array does not fit the mesh and the rules.
    """
    declared = frozen_of(objective)
    if declared is None:
        return FrozenArrays()
    tensors = jax.tree_util.tree_map_with_path(
        lambda path, leaf, names: Tensor(("frozen", *path_of(path)), names, False), declared.abstract, declared.axes
    )

    def placed(leaf: jax.ShapeDtypeStruct, tensor: Tensor) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(mesh, tensor.axes, leaf.shape, rules, tensor.name)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.tree.map(placed, declared.abstract, tensors)
    return FrozenArrays(abstract, tensors, lambda: declared.make(abstract))

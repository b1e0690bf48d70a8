"""The arrays that a step reads and never changes (`objectives.Frozen`), on the devices of a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from trainer.objectives import Objective, frozen_of
from trainer.ops.paths import by_path
from trainer.sharding import Axes, Rules, named_sharding
from trainer.state import Tensor


class FrozenArrays(NamedTuple):
    """The argument `frozen` of a step: one pytree, which is not donated, differentiated, selected, mapped over islands
    or saved. It is () unless the objective declares it."""

    abstract: Any = ()  # shapes with shardings
    tensors: tuple[Tensor, ...] = ()  # of its leaves
    make: Callable[[], Any] = tuple  # returns the arrays; called once at the beginning of each process


def frozen_arrays(objective: Objective, mesh: Mesh, rules: Rules) -> FrozenArrays:
    """Returns what `objective` declares, with the shardings that `rules` give.

    Raises:
      UserError: the shape of an array does not fit the mesh and the rules.
    """
    declared = frozen_of(objective)
    if declared is None:
        return FrozenArrays()
    axes = jax.tree.leaves(jax.tree.map(lambda leaf, names: Axes(names), declared.abstract, declared.axes))
    tensors = tuple(
        Tensor(("frozen", *path), names, False) for path, names in zip(by_path(declared.abstract), axes, strict=True)
    )

    def placed(leaf: jax.ShapeDtypeStruct, tensor: Tensor) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(mesh, tensor.axes, leaf.shape, rules, tensor.name)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    leaves, structure = jax.tree.flatten(declared.abstract)
    abstract = jax.tree.unflatten(structure, map(placed, leaves, tensors))
    return FrozenArrays(abstract, tensors, lambda: declared.make(abstract))

"""The arrays that a step reads but never changes (`objectives.Frozen`), on the devices of a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.objectives.base import Objective, frozen_of
from trainer.ops.paths import path_of
from trainer.sharding import Rules, named_sharding
from trainer.state.host import HOST
from trainer.state.shardings import Tensor


class FrozenArrays(NamedTuple):
    """Describes the argument `frozen` of a step: a pytree of arrays that no step changes and no checkpoint contains.

    If the objective declares no such arrays, the argument is (); the default values of the fields describe this case.

    Attributes:
      abstract: a ShapeDtypeStruct with a sharding for every array.
      tensors: a `state.Tensor` for every array.
      make: returns the arrays, given the run's initial parameters, which may be None unless `of_parameters` is true.
        Called once at the start of each process, but never if `place` is set.
      of_parameters: whether the arrays are copies of the run's initial parameters.
      place: the configuration key for the folder with a teacher's weights; "" if the arrays are not a teacher's. flops:
        see `objectives.Frozen`.
      fetch: moves arrays from host memory to the device; for use under jit.
    """

    abstract: Any = ()
    tensors: Any = ()
    make: Callable[..., Any] = lambda params=None: ()
    of_parameters: bool = False
    place: str = ""
    flops: float = 0.0
    fetch: Callable[[Any], Any] = lambda arrays: arrays


def frozen_arrays(objective: Objective, mesh: Mesh, rules: Rules) -> FrozenArrays:
    """Returns the frozen arrays that `objective` declares, sharded by `rules`.

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
    if declared.place:
        stored = jax.tree.map(_on_host, abstract) if declared.on_host else abstract
        fetch = _fetcher(abstract) if declared.on_host else FrozenArrays().fetch
        return FrozenArrays(stored, tensors, place=declared.place, flops=declared.flops, fetch=fetch)
    if declared.make is not None:
        make = declared.make
        return FrozenArrays(abstract, tensors, lambda params=None: make(abstract))
    return FrozenArrays(abstract, tensors, lambda params: _copied(abstract, params), of_parameters=True)


def _fetcher(abstract: Any) -> Callable[[Any], Any]:
    at = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # The barrier keeps the compiler from all-gathering arrays that are still in host memory.
    return lambda arrays: jax.lax.optimization_barrier(jax.device_put(arrays, at))


def _on_host(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return leaf.update(sharding=leaf.sharding.with_memory_kind(HOST)) if leaf.ndim else leaf


def _copied(abstract: Any, params: Any) -> Any:
    """Returns a copy of `params`, with None in place of each leaf that is None in `abstract`."""
    at = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    kept = jax.tree.map(
        lambda like, leaf: None if like is None else leaf, abstract, params, is_leaf=lambda like: like is None
    )
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=at)(kept)

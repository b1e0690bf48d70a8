"""The sharding of each tensor of a train state, derived from the tensor's path, for NNX, Linen and any optimizer."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from trainer.backends.base import Model
from trainer.ops.paths import Path, by_path
from trainer.sharding import STAGES, Axes, Rules, kept_axes, named_sharding, without_fsdp
from trainer.state.zero1 import over_data

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """The properties of a leaf of a train state that follow from its path. A `Tensor` is a pytree leaf itself."""

    path: Path  # in the TrainTree: params/..., opt_state/..., step, rest/...
    axes: Axes  # logical axis names
    of_parameter: bool  # whether it is a parameter, or optimizer state that belongs to one parameter

    @property
    def name(self) -> str:
        """The path as one string."""
        return "/".join(self.path)


def tensors(model: Model, native: Any) -> Any:
    """Returns a `Tensor` for every leaf of `native`, a native train state of arrays or ShapeDtypeStructs.

    A leaf of the optimizer state belongs to the parameter whose path is a suffix of the leaf's path; optax names
    moments this way inside any wrapper. A leaf with the parameter's shape has the parameter's axes. A leaf that lacks
    some of these axes, such as a factored second moment of row or column sums, has the remaining axes
    (`sharding.kept_axes`). Buffers declare their axis names; other leaves have no axis names.
    """
    axes_of, axes_of_rest = by_path(model.param_axes), by_path(model.rest_axes)
    leaves = [(model.canonical(path), leaf) for path, leaf in by_path(native).items()]
    shapes = {path[1:]: leaf.shape for path, leaf in leaves if path[0] == "params"}

    def tensor(path: Path, leaf: Any) -> Tensor:
        if path[0] in ("params", "opt_state"):
            for start in range(1, len(path)):
                if (owner := path[start:]) in axes_of:
                    return Tensor(path, _of_moment(axes_of[owner], shapes.get(owner), leaf.shape, path), True)
        return Tensor(path, axes_of_rest[path[1:]] if path[0] == "rest" else Axes((None,) * leaf.ndim), False)

    return jax.tree.unflatten(jax.tree.structure(native), [tensor(path, leaf) for path, leaf in leaves])


def _of_moment(axes: Axes, whole: Shape | None, shape: Shape, path: Path) -> Axes:
    """Returns the axes of an array of `shape` at `path` that belongs to a parameter of shape `whole` with `axes`."""
    found = kept_axes(axes, whole, shape) if whole is not None else []
    if not found:
        return Axes((None,) * len(shape))
    # If axes have equal lengths, `found` begins with the axes that lack the last axis. optax sums v_row over the last
    # axis, and v_col over the second to last.
    return found[-1 if "v_col" in path else 0]


def state_shardings(model: Model, abstract: Any, mesh: Mesh, rules: Rules, *, zero1: bool = False) -> Any:
    """Returns the NamedSharding of every leaf of `abstract`, a native train state, in a tree of exactly its structure.

    With `zero1`, parameters and their optimizer state are also sharded over the mesh axis data (`over_data`).

    Raises:
      UserError: the shape of a tensor does not fit the mesh and the rules.
    """

    def one(tensor: Tensor, leaf: Any) -> Any:
        found = named_sharding(mesh, tensor.axes, leaf.shape, rules, tensor.name)
        return over_data(found, leaf.shape) if zero1 and tensor.of_parameter else found

    return jax.tree.map(one, tensors(model, abstract), abstract)


def gathered_stages(named: Any, shardings: Any) -> Any:
    """Returns `shardings` of a native train state, in which weights of pipeline stages are not sharded over fsdp,
    because they are all-gathered once, before the pipeline's first iteration. `named`: the result of `tensors`."""

    def one(tensor: Tensor, sharding: NamedSharding) -> NamedSharding:
        return without_fsdp(sharding) if STAGES in tensor.axes else sharding

    return jax.tree.map(one, named, shardings)


class ParamShardings(NamedTuple):
    """The storage and compute shardings of the parameters: canonical trees of NamedShardings in device memory.

    Between steps, parameters have the specs of `storage`, in the memory that `state.host.storage_shardings` selects:
    device memory, or host memory under `parameter_memory_host_offload`.
    """

    storage: Any  # for parameters at the start and the end of a step, reduced gradients, and updates
    compute: Any  # for parameters in the forward and backward pass; under Zero-1 all-gathered over data

"""Fragments of the parameters. Streaming DiLoCo (arXiv:2501.18512) synchronizes one fragment at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from trainer.config.capabilities.diloco_keys import schedule
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.models.families import stacks
from trainer.ops.paths import Path, path_of


@dataclass(frozen=True)
class Fragment:
    """A subset of the layers of each stack of layers. One fragment also has the parameters outside of the stacks.

    A fragment can be taken from any tree whose leaf paths end with the path of a parameter: the parameters, their
    gradients, or optimizer state. Leaves that are not in the fragment become None.
    """

    layers: dict[Path, range]  # the fragment's layers in the stack at each path, as indices of the parameters' axis 0
    counts: dict[Path, int]  # the number of layers in the stack at each path
    outside: bool

    def part(self, tree: Any, before: int = 0) -> Any:
        """Returns this fragment of `tree`, whose leaves have `before` axes in front of a parameter's axes."""

        def one(path: Any, leaf: Any) -> Any:
            if (stack := self._stack(path)) is None:
                return leaf if self.outside else None
            chosen = self.layers[stack]
            if len(chosen) in (0, self.counts[stack]):
                return leaf if chosen else None
            return jax.lax.slice_in_dim(leaf, chosen.start, chosen[-1] + 1, chosen.step, before)

        return jax.tree_util.tree_map_with_path(one, tree)

    def put(self, tree: Any, part: Any, before: int = 0) -> Any:
        """Returns `tree` with this fragment replaced by `part`, a tree like `self.part(tree, before)`."""

        def one(path: Any, leaf: Any, new: Any) -> Any:
            if new is None:
                return leaf
            stack = self._stack(path)
            if stack is None or len(self.layers[stack]) == self.counts[stack]:
                return new
            return _spread(leaf, new, self.layers[stack], before)

        return jax.tree_util.tree_map_with_path(one, tree, part)

    def shardings(self, tree: Any) -> Any:
        """Returns this fragment of `tree`, a tree of the parameters' shardings.

        The mesh axes that shard the layers of a stack are dropped if their product does not divide the number of layers
        that the fragment has in this stack.
        """

        def one(path: Any, sharding: NamedSharding) -> NamedSharding | None:
            if (stack := self._stack(path)) is None:
                return sharding if self.outside else None
            if not (chosen := self.layers[stack]):
                return None
            entry, *others = (*sharding.spec, None)
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            if len(chosen) % int(np.prod([sharding.mesh.shape[axis] for axis in axes])):
                return sharding.update(spec=PartitionSpec(None, *others[:-1]))
            return sharding

        return jax.tree_util.tree_map_with_path(one, tree)

    def _stack(self, path: Any) -> Path | None:
        # The parameters are nested dicts. In the optimizer state, the containers around such dicts are not dicts.
        names = path_of(tuple(dropwhile(lambda key: not isinstance(key, DictKey), path)))
        return names[:2] if names[:2] in self.layers else None


def _spread(leaf: jax.Array, new: jax.Array, chosen: range, axis: int) -> jax.Array:
    """Returns `leaf` with `new` at the indices `chosen` of `axis`.

    Uses a select, because a scatter would all-gather a sharded array.
    """
    count = leaf.shape[axis]
    padding = [(0, 0, 0)] * leaf.ndim
    padding[axis] = (chosen.start, count - 1 - chosen[-1], chosen.step - 1)
    mask = np.zeros([count if i == axis else 1 for i in range(leaf.ndim)], bool)
    mask.reshape(-1)[list(chosen)] = True
    return jnp.where(mask, jax.lax.pad(new, jnp.zeros([], new.dtype), padding), leaf)


def fragments(config: Config) -> list[Fragment]:
    """Returns the fragments of the parameters of `config`, in the order of their numbers.

    A single fragment contains all parameters. Otherwise, fragment 0 contains the parameters outside of the stacks, and
    the layers, numbered consecutively through all stacks, are divided among the other n fragments: layer i is in
    fragment 1 + (i modulo n) or, with `use_sequential_layers`, in one of n contiguous runs whose lengths differ by at
    most one. If a stack repeats a pattern of blocks, each repetition counts as one layer.

    Raises:
      UserError: there are more fragments than layers plus one.
    """
    counts: dict[Path, int] = {("decoder", stack.name): stack.count for stack in stacks(config)}
    number, total = schedule(config).fragments, sum(counts.values())
    if number == 1:
        return [Fragment({path: range(count) for path, count in counts.items()}, counts, True)]
    if number - 1 > total:
        raise UserError(
            f"num_diloco_fragments={number}: the stacks of this decoder have {counted(total, 'layer')}, which can be "
            f"divided into at most {total + 1} fragments"
        )
    chosen = _runs(total, number - 1) if config.use_sequential_layers else _strides(total, number - 1)
    return [
        Fragment(_of_stacks(counts, lambda layers: layers[:0]), counts, True),
        *(Fragment(_of_stacks(counts, choose), counts, False) for choose in chosen),
    ]


def _strides(total: int, number: int) -> list[Callable[[range], range]]:
    def choose(first: int) -> Callable[[range], range]:
        return lambda layers: layers[(first - layers.start) % number :: number]

    return [choose(first) for first in range(number)]


def _runs(total: int, number: int) -> list[Callable[[range], range]]:
    def choose(start: int, stop: int) -> Callable[[range], range]:
        return lambda layers: range(max(start, layers.start), max(min(stop, layers.stop), max(start, layers.start)))

    bounds = [total * i // number for i in range(number + 1)]
    return [choose(start, stop) for start, stop in pairwise(bounds)]


def _of_stacks(counts: dict[Path, int], choose: Callable[[range], range]) -> dict[Path, range]:
    """Returns a dict from the path of each stack to the layers that `choose` selects in the stack, as indices within
    the stack. `choose` gets the range of the stack's layer numbers, which are consecutive through all stacks, and
    returns a part of it."""
    found, first = {}, 0
    for path, count in counts.items():
        chosen = choose(range(first, first + count))
        found[path] = range(chosen.start - first, chosen.stop - first, chosen.step)
        first += count
    return found

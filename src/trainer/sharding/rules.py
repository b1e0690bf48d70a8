"""Maps logical axis names to mesh axes, for one array."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from trainer.config.derived import FSDP
from trainer.config.errors import UserError, nearest

Rules = Mapping[str, tuple[str, ...]]


class Axes(tuple[str | None, ...]):
    """The logical axis names of one array. An `Axes` is a pytree leaf; a plain tuple would be a node."""


class Tiles(str):
    """The name of a parameter's axis, in an array that has one entry for each tile of that axis, such as the scales of
    quantized weights. If the mesh does not divide the number of tiles, the array is replicated over the mesh axes of
    the name."""

    __slots__ = ()


def spec(
    names: Sequence[str | None], rules: Rules, what: str = "an array", shape: Sequence[int] | None = None
) -> PartitionSpec:
    """Returns the PartitionSpec of an array with logical axes `names`. An axis named None is never sharded.

    `what` and `shape` describe the array in messages.

    Raises:
      UserError: a name has no rule, or two axes of the array map to the same mesh axis.
    """
    entries = []
    taken: dict[str, str] = {}
    title = _title(what, names, shape)
    for name in names:
        if name is not None and name not in rules:
            known = f"logical_axis_rules has {', '.join(rules)}{nearest(name, rules)}"
            raise UserError(f"{title}: no rule for the logical axis {name}; {known}")
        axes = rules[name] if name is not None else ()
        for axis in axes:
            if axis in taken:
                raise UserError(
                    f"{title}: {taken[axis]} and {name} both map to mesh axis {axis}; give one of them another rule"
                )
            taken[axis] = str(name)
        entries.append(entry(axes))
    return PartitionSpec(*entries)


def named_sharding(
    mesh: Mesh | AbstractMesh,
    names: Sequence[str | None],
    shape: Sequence[int],
    rules: Rules,
    what: str = "an array",
) -> NamedSharding:
    """Returns the sharding on `mesh` of an array of `shape` with logical axes `names`; `what`: see `spec`.

    Raises:
      UserError: for the reasons in `spec`, or because the mesh axes of a logical axis do not divide the size of this
        axis. (If the axis is named by a `Tiles`, it is replicated instead.)
    """
    partition = spec(names, rules, what, shape)
    entries = []
    for name, size, axes in zip(names, shape, map(axes_of, partition), strict=True):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts and not isinstance(name, Tiles):
            split = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
            raise UserError(f"{_title(what, names, shape)}: {split} by the rule of {name} does not divide {size}")
        entries.append(None if size % parts else entry(axes))
    return NamedSharding(mesh, PartitionSpec(*entries))


def without_fsdp(sharding: NamedSharding) -> NamedSharding:
    """Returns `sharding` without the mesh axes in `config.derived.FSDP`."""
    kept = [entry([axis for axis in axes_of(part) if axis not in FSDP]) for part in sharding.spec]
    return NamedSharding(sharding.mesh, PartitionSpec(*kept), memory_kind=sharding.memory_kind)


def memory_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of axes, outermost first, in which an array of `shape` takes the least memory on a TPU.

    A TPU stores the last two axes in tiles of 8 x 128 numbers and pads incomplete tiles. One axis is moved to the end,
    or two axes if moving one still leaves padding. In a tie, the given order is kept.
    """

    def padded(order: tuple[int, ...], small: tuple[int, ...] = ()) -> int:
        *outer, rows, columns = (shape[axis] for axis in order)
        tile = rows if rows in small else 8
        return math.prod(outer) * math.ceil(rows / tile) * tile * math.ceil(columns / 128) * 128

    axes = tuple(range(len(shape)))
    if len(shape) < 2:
        return axes
    moved = [(*axes[:last], *axes[last + 1 :], last) for last in reversed(axes)]
    one = min(moved, key=padded)
    if padded(one) == math.prod(shape):
        return one
    both = [(*order[:i], *order[i + 1 : -1], order[i], order[-1]) for order in moved for i in reversed(axes[:-1])]
    # TPUs also have tiles of 1, 2 and 4 rows.
    return min([one, *both], key=lambda order: padded(order, small=(1, 2, 4)))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """Returns the entry of a PartitionSpec that stands for the mesh axes `axes`. Inverts `axes_of`."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def _title(what: str, names: Sequence[str | None], shape: Sequence[int] | None) -> str:
    return f"{what} {_list(names)}" + (f" of shape {_list(shape)}" if shape is not None else "")


def _list(items: Sequence[object]) -> str:
    return f"[{', '.join(map(str, items))}]"

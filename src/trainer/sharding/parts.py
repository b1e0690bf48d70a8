"""The logical axes of arrays derived from a parameter, such as quantized parts or sums over some axes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.errors import UserError
from trainer.sharding.context import shards
from trainer.sharding.rules import Axes, Tiles

# The logical axes that stack layers. They are the leading axes of a stack's parameters: all three with a pipeline, and
# only LAYERS without a pipeline.
REPEATS, STAGES, LAYERS = STACKED = ("circular_repeats", "stages", "layers")


def leading(axes: Sequence[str | None]) -> int:
    """Returns the number of leading axes that stack layers (STACKED): 3 in a pipeline, 1 in other stacks, else 0."""
    return len(axes) - len([*itertools.dropwhile(STACKED.__contains__, axes)])


def axes_of_parts(axes: Axes, parameter: Any, name: str = "a parameter") -> Any:
    """Returns the axes of each array of a parameter, in a tree with the parameter's structure.

    The parameter is an array with `axes`, or a pytree of parts such as integers and their scales. The shape of the
    parameter is the elementwise maximum over the shapes of all parts that have as many axes as `axes`. A part has this
    shape, but may lack some axes or have length 1 in them.

    A part that lacks no axis may also have one entry for each tile of an axis, such as a scale for each group of
    inputs. If all tiles have equal lengths, this axis of the part keeps its name, as a `rules.Tiles`: each device
    stores the entries for its tiles of the parameter, or for all tiles if the mesh does not divide the number of tiles.
    If the last tile is shorter, this axis of the part has no name.

    Raises:
      UserError: the shape of a part does not fit, or it is ambiguous which of several equally long axes a part lacks.
    """
    if jax.tree_util.all_leaves([parameter]):
        return axes
    whole = _whole(axes, parameter)

    def one(path: Any, part: Any) -> Axes:
        found = kept_axes(axes, whole, part.shape) or _tiled_axes(axes, whole, part.shape)
        if len(found) == 1:
            return found[0]
        title = f"{name} [{', '.join(map(str, axes))}] of shape {list(whole)}: its part"
        title += f" {jax.tree_util.keystr(path, simple=True, separator='/')} of shape {list(part.shape)}"
        if not found:
            raise UserError(
                f"{title} does not fit: in each axis, a part may have the full length, length 1, or one entry per "
                "tile; or it may lack axes other than layers"
            )
        raise UserError(f"{title} may lack either of two equally long axes; give it length 1 in the axes that it lacks")

    return jax.tree_util.tree_map_with_path(one, parameter)


def with_own_tiles(axes: Axes, parameter: Any, name: str = "a parameter") -> Any:
    """Returns the parameter with parts that `shard_mapped` can shard like the parameter: if a tile would span devices,
    tiles are divided into smaller ones, and the entry of a tile is repeated for each of its smaller tiles. `axes`: the
    axes by which `shard_mapped` shards the parameter. Raises UserError if the last tile of a sharded axis is shorter
    than the others."""
    if jax.tree_util.all_leaves([parameter]):
        return parameter
    whole = _whole(axes, parameter)

    def one(part: Any) -> Any:
        for i, (of_axis, length) in enumerate(zip(axes, whole, strict=True) if part.ndim == len(axes) else ()):
            devices, count = shards([of_axis]), part.shape[i]
            if devices == 1 or count == 1:
                continue
            if length % count:
                raise UserError(
                    f"{name} {list(whole)}: {count} tiles of axis {i} have unequal lengths, so {of_axis} cannot be "
                    f"sharded over {devices} devices; give a tile that divides {length}"
                )
            if count % devices:
                tile = length // count
                part = jnp.repeat(part, tile // math.gcd(tile, length // devices), i)
        return part

    return jax.tree.map(one, parameter)


def _whole(axes: Axes, parameter: Any) -> tuple[int, ...]:
    shapes = [part.shape for part in jax.tree.leaves(parameter)]
    return tuple(map(max, zip(*(shape for shape in shapes if len(shape) == len(axes)), strict=True)))


def kept_axes(axes: Axes, whole: Sequence[int], shape: Sequence[int]) -> list[Axes]:
    """Returns the possible axes of an array of `shape` that was derived from an array of shape `whole` with `axes`; []
    if `shape` does not fit.

    The array may lack axes, except those in STACKED. Axes that were reduced to length 1 have no name; the others keep
    their names. If axes have equal lengths, there may be several results; those that lack the last axes come first.
    """
    if len(whole) != len(axes):
        return []
    if tuple(shape) == tuple(whole):
        return [axes]
    stacked = {i for i, name in enumerate(axes) if name in STACKED}
    found: dict[tuple[str | None, ...], Axes] = {}
    for kept in itertools.combinations(range(len(axes)), len(shape)):
        if stacked <= set(kept) and all(size in (1, whole[i]) for size, i in zip(shape, kept, strict=True)):
            names = Axes(axes[i] if size == whole[i] else None for size, i in zip(shape, kept, strict=True))
            # An axis of length 1 is never sharded, so results that differ only in the name of such an axis count as
            # equal.
            found.setdefault(tuple(name if size > 1 else None for name, size in zip(names, shape, strict=True)), names)
    return list(found.values())


def _tiled_axes(axes: Axes, whole: Sequence[int], shape: Sequence[int]) -> list[Axes]:
    """Returns the axes of a part that has one entry for each tile of some axes; [] if `shape` does not fit."""
    if len(shape) != len(axes):
        return []
    names = []
    for name, length, count in zip(axes, whole, shape, strict=True):
        tile = math.ceil(length / max(count, 1))
        if math.ceil(length / tile) != count or (name in STACKED and count != length):
            return []
        tiled = None if name is None or count == 1 or length % count else Tiles(name)
        names.append(name if count == length else tiled)
    return [Axes(names)]

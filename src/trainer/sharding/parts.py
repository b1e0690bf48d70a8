"""The logical axes of arrays derived from a parameter: its parts, and sums over some of its axes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.errors import UserError
from trainer.sharding.context import shards
from trainer.sharding.rules import Axes, Tiles

# The logical axes that stack the layers of a stack: the leading axes of its parameters. Without a pipeline only LAYERS.
REPEATS, STAGES, LAYERS = STACKED = ("circular_repeats", "stages", "layers")


def leading(axes: Sequence[str | None]) -> int:
    """Returns the number of leading axes that stack the layers of a stack: 0, 1, or 3 in a pipeline."""
    return len(axes) - len([*itertools.dropwhile(STACKED.__contains__, axes)])


def axes_of_parts(axes: Axes, parameter: Any, name: str = "a parameter") -> Any:
    """Returns the axes of each array of a parameter, in a tree with the parameter's structure.

    The parameter is an array with `axes`, or a pytree of parts such as integers and their scales. The shape of the
    parameter is the smallest that contains all parts with an axis for each of `axes`. A part has this shape, but may
    lack some axes or have length 1 in them. A part with an axis for each of `axes` may also have one entry for each
    tile of an axis, such as a scale for each group of inputs. If all tiles have equal lengths, the part's axis keeps
    its name, as `Tiles`: a device then holds the entries for its tiles of the parameter, or for all tiles if the mesh
    does not divide their number.
    If the last tile is shorter, the axis of the part has no name.

    Raises:
      UserError: a part has another shape, or it is ambiguous which of several equally long axes a part lacks.
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
                f"{title} does not fit: a part may only lack axes, except layers, or have length 1 in them, or have an "
                "entry for each tile of an axis"
            )
        raise UserError(f"{title} may lack one axis or another; give it length 1 in the axes that it lacks")

    return jax.tree_util.tree_map_with_path(one, parameter)


def with_own_tiles(axes: Axes, parameter: Any, name: str = "a parameter") -> Any:
    """Returns the parameter with parts that can be sharded like the parameter, for `shard_mapped`: if devices share a
    tile, the parts get entries for smaller tiles, so that no tile spans two devices. `axes`: the parameter's axes in
    `shard_mapped`. Raises UserError if the last tile of a sharded axis is shorter."""
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
    """Returns possible axes of an array of `shape`, derived from an array of shape `whole` with `axes`; [] if it does
    not fit.

    The array may lack axes, except those in STACKED. Axes that were reduced to length 1 have no name; the others keep
    their names. If axes have equal lengths, there are several possibilities; those that lack the last axes come first.
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
            # An axis of length 1 is not sharded, whatever its name.
            found.setdefault(tuple(name if size > 1 else None for name, size in zip(names, shape, strict=True)), names)
    return list(found.values())


def _tiled_axes(axes: Axes, whole: Sequence[int], shape: Sequence[int]) -> list[Axes]:
    """Returns the axes of a part that has one entry for each tile of some axes; [] if it does not fit."""
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

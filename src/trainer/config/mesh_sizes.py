"""The sizes of the mesh axes: fills in -1, and reports sizes that do not fit the devices."""

import math
from collections.abc import Iterable, Iterator, Mapping

from trainer.config.derived import DCN, ICI, UNUSED_AXES
from trainer.config.errors import Unbuilt
from trainer.config.keys import Config
from trainer.config.numbers import divisors
from trainer.config.words import counted


def fill_mesh(values: Config, device_count: int, num_slices: int | None) -> list[str]:
    """Replaces each axis size -1 in `values` so that the mesh uses all slices and all devices of each slice. Returns
    errors.

    `num_slices` is None for devices without slices, such as CPUs. In that case, the number of slices is the product of
    the axis sizes across slices.
    """
    if missing := _unbuilt(values):
        return missing
    if num_slices is None:
        num_slices = math.prod(size for size in _sizes(values, DCN).values() if size != -1)
        if device_count % num_slices:
            asked = _product(_sizes(values, DCN))
            best = min(divisors(device_count), key=lambda n: abs(math.log(n / num_slices)))
            return [f"{asked} slices do not divide the {device_count} devices; nearest: {best} slices"]
    in_slices = f" in each of {num_slices} slices" if num_slices > 1 else ""
    return [
        *_fill(values, ICI, device_count // num_slices, f"{counted(device_count // num_slices, 'device')}{in_slices}"),
        *_fill(values, DCN, num_slices, counted(num_slices, "slice")),
    ]


def _unbuilt(values: Config) -> list[str]:
    """Returns an error for each unused axis with a size other than 1. Stage 1 (`load`) checks this, too, but `values`
    may have been changed since."""
    return [
        Unbuilt(f"{keys[axis]}={values[keys[axis]]}: {reason}; leave it at 1")
        for axis, reason in UNUSED_AXES.items()
        for keys in (ICI, DCN)
        if values[keys[axis]] != 1
    ]


def _fill(values: Config, keys: Mapping[str, str], count: int, what: str) -> list[str]:
    """Replaces the size -1 so that the product of the sizes is `count`. Returns errors. `keys` maps each axis to the
    key of its size; `what` is `count` in words, such as "8 devices"."""
    sizes = _sizes(values, keys)
    known = math.prod(size for size in sizes.values() if size != -1)
    left_over = [axis for axis, size in sizes.items() if size == -1]
    if left_over and count % known == 0:
        values[keys[left_over[0]]] = count // known
        return []
    if known == count:
        return []
    nearest = _nearest_mesh(sizes, count)
    fitting = " ".join(f"{keys[axis]}={size}" for axis, size in nearest.items() if size != sizes[axis])
    if left_over:
        problem = f"{_product(sizes)}, which does not divide the {what} for {keys[left_over[0]]}=-1"
    else:
        problem = f"{_product(sizes)}, but there {'is' if count == 1 else 'are'} {what}"
    return [f"{problem}; nearest: {fitting}"]


def _sizes(values: Config, keys: Mapping[str, str]) -> dict[str, int]:
    return {axis: values[key] for axis, key in keys.items()}


def _product(sizes: Mapping[str, int]) -> str:
    """Returns the product of the sizes in words, for example `data 2 x fsdp 3 = 6`. Omits axes of size 1 or -1."""
    shown = {axis: size for axis, size in sizes.items() if size not in (1, -1)}
    factors = " x ".join(f"{axis} {size}" for axis, size in shown.items()) or "all axes 1"
    return f"{factors} = {math.prod(shown.values())}" if len(shown) > 1 else factors


def _nearest_mesh(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Returns a dict from axes to sizes with the product `count` that are nearest to `sizes`, by ratio. -1 matches any
    size.

    Axes of size 1, other than data and fsdp, keep this size and are omitted from the result.
    """
    free = [axis for axis, size in sizes.items() if axis in ("data", "fsdp") or (size != 1 and axis not in UNUSED_AXES)]
    asked = [sizes[axis] for axis in free]

    def distance(mesh: Iterable[int]) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(mesh, asked, strict=True) if b != -1)

    return dict(zip(free, min(_factorizations(count, len(free)), key=distance), strict=True))


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorizations(number // first, parts - 1):
                yield (first, *rest)

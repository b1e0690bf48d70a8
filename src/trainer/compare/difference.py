"""Differences between two arrays."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from trainer.compare.summary import Summary, cut, digest, numbered, part

# Maps an array's name to the numbers of the layers along the array's first axis, or to None if the array is not
# stacked.
Layers = Callable[[str], Iterable[int] | None]


class Tolerance(NamedTuple):
    """Tolerances for the comparison of two arrays.

    Elements may differ by at most `atol`, or by at most `rtol` times the largest magnitude in the two arrays. If `atol`
    and `rtol` are 0, only bit-identical arrays are equal. Integers and bools must be equal with any tolerance.
    """

    rtol: float = 0.0
    atol: float = 0.0


BITS = Tolerance()


class Difference(NamedTuple):
    """The difference between the left and the right side of an array, or of one layer of a stacked array.

    Attributes:
      name: canonical, such as "decoder/layers/mlp/wo/kernel".
      layer: the layer number; None for an array without layers.
      bits: whether both sides have the same dtype and the same bits.
      equal: whether both sides have the same bits, or are equal within the tolerance.
      absolute: the largest absolute difference of corresponding elements. It is infinite if a differing element is not
        finite, or if the arrays cannot be subtracted. In the latter case, `note` contains the reason.
      relative: `absolute` divided by the largest magnitude in the two arrays.
      note: a description of a difference other than in values: different dtypes or shapes, or an array that one side
        lacks.
      summaries: statistics of both sides if the sides differ and the left side is a record with only a checksum of the
        array, not its values; otherwise "". With statistics, `absolute` and `relative` are infinite.
    """

    name: str
    layer: int | None
    bits: bool
    equal: bool
    absolute: float
    relative: float
    note: str = ""
    summaries: str = ""

    @property
    def where(self) -> str:
        """The name and the layer, as text for a message."""
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def forward_order(entry: Difference) -> tuple[int, int, bool, str, str]:
    """Returns a sort key for the order of the forward pass: embedding, each layer with its output last, norm,
    logits."""
    if entry.layer is not None:
        # Within a layer, sorted by the last part of the name, because the order of computation is unknown.
        return 1, entry.layer, entry.name.endswith("/output"), entry.name.rpartition("/")[2], entry.name
    return 0 if "embedd" in entry.name else 2, 0, False, entry.name, entry.name


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], tolerance: Tolerance, layers: Layers
) -> list[Difference]:
    """Returns a Difference for each array that either side has. A stacked array gets a Difference for each layer.

    The arrays of the left side come first, in its order, followed by arrays that only the right side has. Arrays may be
    on devices: they are copied to the host one by one. If the left side is a record, its arrays are `Summary` objects.
    """
    different: list[Difference] = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            side = "left" if name in left else "right"
            different.append(Difference(name, None, False, False, math.inf, math.inf, f"only on the {side}"))
            continue
        known, array = left[name], np.asarray(right[name])
        if isinstance(known, Summary):
            different += _of_summary(name, known, array, tolerance)
        else:
            different += _of_array(name, np.asarray(known), array, tolerance, layers(name))
    return different


def _of_summary(name: str, left: Summary, right: np.ndarray, tolerance: Tolerance) -> Iterator[Difference]:
    """Compares the checksums in `left` with those of `right`. If they differ and the record contains the values,
    compares the values."""
    same = left.shape == right.shape and left.dtype == str(right.dtype)
    mine = list(cut(right, left.layers)) if same else []
    bits = [a.digest == digest(b) for a, b in zip(left.parts, mine, strict=same)]
    if left.read is not None and not (same and all(bits)):
        yield from _of_array(name, left.read(), right, tolerance, left.layers)
        return
    if not same:
        note = f"{left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
        yield Difference(name, None, False, False, math.inf, math.inf, note)
        return
    layers = [None] if left.layers is None else left.layers
    for layer, equal, a, b in zip(layers, bits, left.parts, mine, strict=True):
        size, numbers = (0.0, "") if equal else (math.inf, f"{a} against {part(b)}")
        yield Difference(name, layer, equal, equal, size, size, summaries=numbers)


def _of_array(
    name: str, left: np.ndarray, right: np.ndarray, tolerance: Tolerance, layers: Iterable[int] | None
) -> Iterator[Difference]:
    if left.shape != right.shape:
        note = f"shape {list(left.shape)} against {list(right.shape)}"
        yield Difference(name, None, False, False, math.inf, math.inf, note)
    else:
        numbers = numbered(left, layers)
        parts = zip(numbers or [None], cut(left, numbers), cut(right, numbers), strict=True)
        for layer, a, b in parts:
            yield difference(name, a, b, tolerance, layer=layer)


def difference(
    name: str, left: np.ndarray, right: np.ndarray, tolerance: Tolerance, layer: int | None = None
) -> Difference:
    """Returns the difference of two arrays with the same shape."""
    note = "" if left.dtype == right.dtype else f"{left.dtype} against {right.dtype}"
    if not note and left.tobytes() == right.tobytes():
        return Difference(name, layer, True, True, 0.0, 0.0)
    a, b = left.astype(np.float64), right.astype(np.float64)
    scale = max(_largest(a), _largest(b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart = np.where(np.isnan(apart), math.inf, apart)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)  # equal infinities also count as equal
    absolute = float(apart.max(initial=0.0))
    relative = absolute / scale if scale else absolute
    # JAX's issubdtype, because NumPy's does not know bfloat16.
    rounded = all(jnp.issubdtype(array.dtype, jnp.inexact) for array in (left, right))
    tolerates = rounded and tolerance != BITS and (absolute <= tolerance.atol or relative <= tolerance.rtol)
    return Difference(name, layer, False, tolerates, absolute, relative, note)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))

"""How far two arrays lie apart."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# From the name of an array to the numbers of the layers that it holds along its first axis; None: it holds none.
Layers = Callable[[str], Iterable[int] | None]


class Tolerance(NamedTuple):
    """Two arrays are equal within it if no two elements lie further apart than `atol`, or than `rtol` times the largest
    magnitude in both arrays. 0 and 0 ask for equal bits. Integers and bools count something, and are never equal
    within it."""

    rtol: float = 0.0
    atol: float = 0.0


BITS = Tolerance()


class Difference(NamedTuple):
    """Of one array, or of one layer's part of it, on two sides.

    Attributes:
      name: canonical, such as "decoder/layers/mlp/wo/kernel".
      layer: which layer's part; None for an array without layers.
      bits: both have one dtype and the same bits.
      equal: they have the same bits, or lie within the tolerance.
      absolute: the largest difference of two elements; infinite where one of them is not finite, or where `note`
        says why there is nothing to subtract.
      relative: `absolute` as a share of the largest magnitude in both.
      note: what differs besides values: a dtype, a shape, or that one side lacks the array.
    """

    name: str
    layer: int | None
    bits: bool
    equal: bool
    absolute: float
    relative: float
    note: str = ""

    @property
    def place(self) -> str:
        """The name and the layer, in words."""
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def forward_order(it: Difference) -> tuple[int, int, bool, str]:
    """Sorts arrays in the order of the forward pass: embedding, layer by layer with its result last, norm, logits."""
    if it.layer is not None:
        return 1, it.layer, it.name.endswith("/output"), it.name
    return 0 if "embedd" in it.name else 2, 0, False, it.name


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], tolerance: Tolerance, layers: Layers
) -> list[Difference]:
    """One for each array, or layer of it, that either side has: by the names on the left, then the others.

    Arrays may live on devices: they come to the host one at a time.
    """
    found: list[Difference] = []
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            side = "left" if name in left else "right"
            found.append(Difference(name, None, False, False, math.inf, math.inf, f"only on the {side}"))
            continue
        found += _of_array(name, np.asarray(left[name]), np.asarray(right[name]), tolerance, layers(name))
    return found


def _of_array(
    name: str, left: np.ndarray, right: np.ndarray, tolerance: Tolerance, layers: Iterable[int] | None
) -> Iterator[Difference]:
    if left.shape != right.shape:
        note = f"shape {list(left.shape)} against {list(right.shape)}"
        yield Difference(name, None, False, False, math.inf, math.inf, note)
    elif layers is not None and left.ndim:
        for layer, a, b in zip(layers, left, right, strict=False):
            yield difference(name, a, b, tolerance, layer=layer)
    else:
        yield difference(name, left, right, tolerance)


def difference(
    name: str, left: np.ndarray, right: np.ndarray, tolerance: Tolerance, layer: int | None = None
) -> Difference:
    """Of two arrays of one shape."""
    note = "" if left.dtype == right.dtype else f"{left.dtype} against {right.dtype}"
    if not note and left.tobytes() == right.tobytes():
        return Difference(name, layer, True, True, 0.0, 0.0)
    a, b = left.astype(np.float64), right.astype(np.float64)
    scale = max(_largest(a), _largest(b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart = np.where(np.isnan(apart), math.inf, apart)
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)  # infinities of one sign too
    absolute = float(apart.max(initial=0.0))
    relative = absolute / scale if scale else absolute
    rounded = all(jnp.issubdtype(it.dtype, jnp.inexact) for it in (left, right))  # numpy knows no bfloat16
    tolerates = rounded and tolerance != BITS and (absolute <= tolerance.atol or relative <= tolerance.rtol)
    return Difference(name, layer, False, tolerates, absolute, relative, note)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))

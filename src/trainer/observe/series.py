"""The values of one measure over the steps of a run. Its size does not grow with the number of steps."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

INTERVALS = 400  # the maximum; a screen shows no more
_LARGEST = 1e300  # differences of smaller numbers are finite

Point = tuple[float, float]


class _Interval(NamedTuple):
    """The lowest and the highest point among consecutive values; None if none of them is finite.

    `broken`: whether the line is interrupted after it, because one of its values is not finite.
    """

    low: Point | None
    high: Point | None
    broken: bool

    def joined(self, other: "_Interval") -> "_Interval":
        lows = [point for point in (self.low, other.low) if point is not None]
        highs = [point for point in (self.high, other.high) if point is not None]
        return _Interval(
            min(lows, key=_height, default=None), max(highs, key=_height, default=None), self.broken or other.broken
        )


class Series:
    """Points (step, value) in the order of the steps, stored as at most INTERVALS intervals of equally many values.

    An interval keeps its lowest and its highest point, so no spike is lost. Up to 2 * INTERVALS values are all kept.
    """

    def __init__(self) -> None:
        self.count = 0  # the number of values so far, including those that are not finite
        self._intervals: list[_Interval] = []
        self._size = 1  # the number of values per interval
        self._filled = 1  # the number of values in the last interval

    @classmethod
    def of(cls, points: Iterable[tuple[float, Any]]) -> Self:
        """Returns the series of `points`."""
        made = cls()
        for step, value in points:
            made.add(step, value)
        return made

    def add(self, step: float, value: Any) -> None:
        """Appends a point. A value that is not a finite number interrupts the line. For lists see `number`."""
        y = number(value)
        point = (float(step), y) if math.isfinite(y) else None
        self.count += 1
        new = _Interval(point, point, point is None)
        if self._intervals and self._filled < self._size:
            self._intervals[-1] = self._intervals[-1].joined(new)
            self._filled += 1
            return
        if len(self._intervals) == INTERVALS:
            pairs = zip(self._intervals[::2], self._intervals[1::2], strict=True)
            self._intervals = [left.joined(right) for left, right in pairs]
            self._size *= 2
        self._intervals.append(new)
        self._filled = 1

    @property
    def thinned(self) -> bool:
        """Whether some of the values were dropped."""
        return self._size > 2

    def parts(self) -> list[list[Point]]:
        """Returns the kept points, divided where the line is interrupted."""
        parts: list[list[Point]] = [[]]
        for low, high, broken in self._intervals:
            if low is not None and high is not None:
                parts[-1] += sorted({low, high})
            if broken and parts[-1]:
                parts.append([])
        return [part for part in parts if part]


def number(value: Any) -> float:
    """Returns a number of a row. Of a list, such as one number per layer, returns the largest. Returns NaN for anything
    else, so that a manually edited file does not prevent a chart."""
    if isinstance(value, list):
        return max((found for found in map(number, value) if math.isfinite(found)), default=math.nan)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else math.nan


def _height(point: Point) -> Point:
    return point[1], point[0]  # among equal values the first is lowest and the last highest, so both ends are kept

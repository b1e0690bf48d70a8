"""The values of one measure over the steps of a run, in memory that does not grow with the number of steps."""

import math
from collections.abc import Iterable
from typing import Any, Self

INTERVALS = 400  # the maximum number of intervals; a screen cannot show more
_LARGEST = 1e300  # larger values count as not finite, so that differences of finite values do not overflow

Point = tuple[float, float]


class _Interval:
    """The lowest and the highest point among consecutive values; None if no value is finite.

    Among equal values, the first counts as the lowest and the last as the highest, so that both ends of a constant
    interval are kept.

    Attributes:
      broken: whether the line is interrupted after the interval, because one of the interval's values is not finite.
    """

    __slots__ = ("broken", "high", "low")

    def __init__(self) -> None:
        self.low: Point | None = None
        self.high: Point | None = None
        self.broken = False

    def add(self, low: Point, high: Point) -> None:
        """Adds later values, given by their lowest and their highest point."""
        if self.low is None or low[1] < self.low[1]:
            self.low = low
        if self.high is None or high[1] >= self.high[1]:
            self.high = high

    def join(self, other: "_Interval") -> "_Interval":
        """Merges the next interval into this interval, and returns this interval."""
        if other.low is not None and other.high is not None:
            self.add(other.low, other.high)
        self.broken |= other.broken
        return self


class Series:
    """Points (step, value) in the order of the steps, stored as at most INTERVALS intervals of equally many values.

    An interval keeps its lowest and its highest point, so no spike is lost. If there are at most 2 * INTERVALS values,
    all are kept.
    """

    def __init__(self) -> None:
        self.count = 0  # the number of values so far, including those that are not finite
        self._intervals: list[_Interval] = []
        self._size = 1  # the number of values per interval
        self._filled = 0  # the number of values in the last interval

    @classmethod
    def of(cls, points: Iterable[tuple[float, Any]]) -> Self:
        """Returns the series of `points`."""
        made = cls()
        for step, value in points:
            made.add(step, value)
        return made

    def add(self, step: float, value: Any) -> None:
        """Appends a point. A value that is not a finite number interrupts the line. For lists see `number`."""
        self.count += 1
        if self._filled == self._size or not self._intervals:
            self._next_interval()
        self._filled += 1
        y = number(value)
        if math.isfinite(y):
            point = (float(step), y)
            self._intervals[-1].add(point, point)
        else:
            self._intervals[-1].broken = True

    def _next_interval(self) -> None:
        """Begins an interval. If there are already INTERVALS intervals, first merges adjacent pairs."""
        if len(self._intervals) == INTERVALS:
            pairs = zip(self._intervals[::2], self._intervals[1::2], strict=True)
            self._intervals = [left.join(right) for left, right in pairs]
            self._size *= 2
        self._intervals.append(_Interval())
        self._filled = 0

    @property
    def thinned(self) -> bool:
        """Whether any value was dropped."""
        return self._size > 2

    def parts(self) -> list[list[Point]]:
        """Returns the kept points, split where the line is interrupted."""
        parts: list[list[Point]] = [[]]
        for interval in self._intervals:
            if interval.low is not None and interval.high is not None:
                parts[-1] += sorted({interval.low, interval.high})
            if interval.broken and parts[-1]:
                parts.append([])
        return [part for part in parts if part]


def number(value: Any) -> float:
    """Returns a row's value as a float. If the value is a list (such as one number per layer), returns the largest
    finite number in it.

    Returns NaN for anything else, so that a manually edited file can still be drawn.
    """
    if type(value) is float:  # most values are floats
        return value if abs(value) < _LARGEST else math.nan
    if isinstance(value, list):
        return max((finite for finite in map(number, value) if math.isfinite(finite)), default=math.nan)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else math.nan

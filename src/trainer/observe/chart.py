"""Line charts and histograms as inline SVG, for a page that works offline and follows the reader's colour scheme."""

import html
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from trainer.observe.series import Point, Series

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 30
_FEW = 30  # a line with at most this many points also shows a dot at each point
COLOURS = 6  # the number of colours; their CSS classes in the page are c0, c1, ...


class Line(NamedTuple):
    """A named line, and the steps at which its run was resumed, which are drawn as dashed vertical lines."""

    name: str
    series: Series
    marks: Collection[float] = ()


def line_chart(title: str, lines: Sequence[Line], unit: str = "", scale: float = 1.0) -> str:
    """Returns a chart of `lines` over steps, with values multiplied by `scale`; "" if no value is finite."""
    parts = [[[(x, scale * y) for x, y in part] for part in line.series.parts()] for line in lines]
    points = [point for series in parts for part in series for point in part]
    if not points:
        return ""
    axes = _Axes([x for x, _ in points], [y for _, y in points])
    drawn = [mark for number, line in enumerate(lines) for mark in _marked(axes, line.marks, f"c{number % COLOURS}")]
    for number, series in enumerate(parts):
        for part in series:
            corners = [(f"{axes.x(x):.1f}", f"{axes.y(y):.1f}") for x, y in part]
            colour = f"c{number % COLOURS}"
            if len(part) > 1:
                drawn.append(f'<polyline class="{colour}" points="{" ".join(map(",".join, corners))}"/>')
            if len(part) <= _FEW:
                drawn += [f'<circle class="{colour}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in corners]
    values = sum(line.series.count for line in lines)
    thinned = [f"{len(points):,} of {values:,} points"] if any(line.series.thinned for line in lines) else []
    return _figure(title, ", ".join(filter(None, [unit, *thinned])), axes.drawn("step") + drawn)


def _marked(axes: "_Axes", steps: Collection[float], colour: str) -> list[str]:
    """Returns dashed lines for the `steps` that are within the chart."""
    at = dict.fromkeys(f"{axes.x(step):.0f}" for step in steps if axes.holds(step))
    return [f'<line class="mark {colour}" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>' for x in at]


def histogram(title: str, values: Sequence[Sequence[float]], unit: str, bins: int = 40) -> str:
    """Returns a histogram with one area for each sequence in `values`; "" if all sequences are empty. The numbers must
    be finite. A number is omitted if it exceeds the 99th percentile of every sequence."""
    arrays = [np.asarray(filled, np.float64) for filled in values]
    filled = [array for array in arrays if array.size]
    if not filled:
        return ""
    low = float(min(map(np.min, filled)))
    # The percentile excludes outliers: the step after a compilation or an evaluation can take a hundred times as long
    # as any other.
    high = float(max(np.percentile(array, 99, method="lower") for array in filled))
    width = (high - low) / bins or 1.0
    counts = [
        np.bincount(np.minimum((array[array <= high] - low) / width, bins - 1).astype(int), minlength=bins)
        for array in arrays
    ]
    axes = _Axes([low, low + width * bins], [0.0, float(max(map(np.max, counts)))])
    drawn = []
    for number, row in enumerate(counts):
        corners: list[Point] = [(low, 0.0)]
        for index, count in enumerate(row.tolist()):
            corners += [(low + index * width, count), (low + (index + 1) * width, count)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in [*corners, (low + width * bins, 0.0)])
        drawn.append(f'<polyline class="c{number % COLOURS} area" points="{path}"/>')
    return _figure(title, "steps", axes.drawn(unit) + drawn)


class _Axes:
    """Maps values to coordinates, and draws ticks at round numbers."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]):
        self._x, self._y = _span(xs), _span(ys)

    def holds(self, x: float) -> bool:
        """Returns whether `x` is within the chart."""
        return self._x[0] <= x <= self._x[1]

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def drawn(self, name: str) -> list[str]:
        marks = []
        for tick in _ticks(*self._y):
            y = self.y(tick)
            marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
        for tick in _ticks(*self._x):
            x = self.x(tick)
            marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{tick:.6g}</text>')
        marks.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">{html.escape(name)}</text>')
        return marks


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-300:  # the range is too narrow for ticks
        margin = max(abs(low) / 2, 1e-290) if low else 0.5
        return low - margin, high + margin
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Returns about five ticks between `low` and `high`, at multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _figure(title: str, unit: str, marks: Sequence[str]) -> str:
    name = html.escape(title)
    of = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{"".join(marks)}</svg>'
    return f"<figure><figcaption>{name}{of}</figcaption>{picture}</figure>"

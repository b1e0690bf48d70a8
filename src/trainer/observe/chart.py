"""Line charts and histograms as inline SVG, for a page that is opened offline and follows the reader's colours."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 30
BINS = 400  # of steps, in a line; a screen shows no more
COLOURS = 6  # the classes c0, c1, ... of the page's style


class Line(NamedTuple):
    """A named line; `ys` that are not finite interrupt it."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def line_chart(title: str, lines: Sequence[Line], unit: str = "") -> str:
    """A chart of `lines` over steps; empty if no value is finite."""
    points = [(x, y) for line in lines for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(y)]
    if not points:
        return ""
    axes = _Axes([x for x, _ in points], [y for _, y in points])
    drawn = []
    for number, line in enumerate(lines):
        for part in _parts(line):
            path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in _thinned(part))
            colour = f"c{number % COLOURS}"
            if len(part) == 1:
                x, _, y = path.partition(",")
                drawn.append(f'<circle class="{colour}" cx="{x}" cy="{y}" r="2.5"/>')
            else:
                drawn.append(f'<polyline class="{colour}" points="{path}"/>')
    return _figure(title, unit, axes.drawn("step") + drawn)


def histogram(title: str, lines: Sequence[Line], unit: str = "", bins: int = 40) -> str:
    """How often each of the values `ys` occurs, up to their 99th percentile; empty without a finite value."""
    values = [sorted(y for y in line.ys if math.isfinite(y)) for line in lines]
    if not any(values):
        return ""
    low = min(found[0] for found in values if found)
    # The step after a compilation or an evaluation can be a hundred times as long as any other.
    high = max(found[(99 * (len(found) - 1)) // 100] for found in values if found)
    width = (high - low) / bins or 1.0
    counts = [[0] * bins for _ in values]
    for found, row in zip(values, counts, strict=True):
        for value in found:
            if value <= high:
                row[min(int((value - low) / width), bins - 1)] += 1
    axes = _Axes([low, low + width * bins], [0.0, float(max(map(max, counts)))])
    drawn = []
    for number, row in enumerate(counts):
        corners = [(low, 0.0)]
        for index, count in enumerate(row):
            corners += [(low + index * width, count), (low + (index + 1) * width, count)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in [*corners, (low + width * bins, 0.0)])
        drawn.append(f'<polyline class="c{number % COLOURS} area" points="{path}"/>')
    return _figure(title, "steps", axes.drawn(unit) + drawn)


class _Axes:
    """Maps values to coordinates, and draws ticks at round numbers."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]):
        self._x, self._y = _span(xs), _span(ys)

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
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-300:  # too narrow for ticks
        margin = max(abs(low) / 2, 1e-290) if low else 0.5
        return low - margin, high + margin
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _parts(line: Line) -> list[list[tuple[float, float]]]:
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.xs, line.ys, strict=True):
        if math.isfinite(y):
            parts[-1].append((x, y))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _thinned(part: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest and the highest point of each bin, so that no spike is lost."""
    size = -(-len(part) // BINS)
    if size <= 2:
        return part
    kept = []
    for begin in range(0, len(part), size):
        block = part[begin : begin + size]
        ends = {min(block, key=lambda point: point[1]), max(block, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _figure(title: str, unit: str, marks: Sequence[str]) -> str:
    name = html.escape(title)
    of = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{"".join(marks)}</svg>'
    return f"<figure><figcaption>{name}{of}</figcaption>{picture}</figure>"

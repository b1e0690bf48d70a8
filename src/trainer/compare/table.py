"""A report as text of at most 120 columns."""

import itertools
import math
import textwrap
from collections.abc import Sequence

from trainer.compare.difference import Difference
from trainer.compare.report import Comparison, Quantity, Report
from trainer.config.words import counted
from trainer.observe.text import si

WIDTH = 120
_BITS, _WITHIN = "equal bits", "within tolerance"
_LISTED = 12  # the maximum number of lines for activations


def table(report: Report) -> str:
    """Returns a description of the comparison, the tables and the verdict.

    A single right side gets one detailed table. Several right sides get a common table, unless it is too wide, followed
    by a detailed table for each right side that differs.
    """
    label = max((len(name) for name, _ in report.head), default=0) + 2
    lines = []
    for name, text in report.head:
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"{name:<{label}}", subsequent_indent=" " * label)
    if len(report.comparisons) > 1:
        lines += ["", *_side_by_side(report.comparisons, report.left)]
    for comparison in report.comparisons:
        if len(report.comparisons) == 1 or not comparison.equal:
            lines += ["", *_details(comparison, report.left)]
    return "\n".join([*lines, "", _verdict(report)])


def _verdict(report: Report) -> str:
    apart = [comparison for comparison in report.comparisons if not comparison.equal]
    tolerance = " and ".join(f"{name}={value:g}" for name, value in report.tolerance._asdict().items() if value)
    if apart:
        lines = []
        for other in apart:
            if other.first_within:
                lines.append(f"the first difference within {tolerance} is in {other.first_within}")
            if other.unsown:
                where = f"layer {other.unsown.layer}"
                lines.append(f"{where} sows only its output; docs/guides/parity.md describes how to look inside")
            lines.append(f"{report.left} and {other.right} differ first in {other.first}{_numbers(other)}")
        if any(map(_numbers, apart)):
            lines.append(f"{report.left} contains only checksums; record with arrays=true to get difference sizes")
        return "\n".join(lines)
    sides = ", ".join([report.left, *(comparison.right for comparison in report.comparisons[:-1])])
    sides = f"{sides} and {report.comparisons[-1].right} are equal"
    return f"{sides} in every bit" if all(one.bits for one in report.comparisons) else f"{sides} within {tolerance}"


def _numbers(comparison: Comparison) -> str:
    """Returns the statistics of both sides at the first difference if the left side is a record without arrays;
    otherwise ""."""
    first = next(quantity for quantity in comparison.quantities if not quantity.equal)
    return f": {first.entry.summaries}" if first.entry and first.entry.summaries and not first.notes else ""


def _side_by_side(comparisons: Sequence[Comparison], left: str) -> list[str]:
    """Returns a table with a column for each right side; [] if it is too wide."""
    rows = [[f"against {left}", *(comparison.right for comparison in comparisons)]]
    for quantities in zip(*(comparison.quantities for comparison in comparisons), strict=True):
        rows.append([f"{quantities[0].name}, {_arrays(quantities[0])}", *map(_cell, quantities)])
    for name in comparisons[0].facts:
        rows.append([f"step: {name}", *(_fact(comparison.facts[name]) for comparison in comparisons)])
    lines = _columns(rows)
    return lines if max(map(len, lines)) <= WIDTH else []


def _arrays(quantity: Quantity) -> str:
    return counted(len({difference.name for difference in quantity.differences}), "array")


def _cell(quantity: Quantity) -> str:
    if quantity.bits:
        return _BITS
    if quantity.equal:
        return _WITHIN
    return f"apart by {_size(quantity.absolute)}" if math.isfinite(quantity.absolute) else "apart"


def _fact(fact: tuple[float, float] | str) -> str:
    """Returns a fact about the compiled step as the text of one table cell."""
    if isinstance(fact, str):
        return fact.partition(",")[0].partition(" from")[0]
    left, right = fact
    return "equal" if left == right else f"{si(right, '')} / {si(left, '')}"


def _details(comparison: Comparison, left: str) -> list[str]:
    """Returns the detailed table of one comparison. It contains the largest differences and the first difference of
    each quantity, followed by facts about the training step, notes and remarks."""
    rows = [[f"{comparison.right} against {left}", "arrays", "", "absolute", "relative", "first difference"]]
    remarks: list[str] = []
    for quantity in comparison.quantities:
        rows.append(_row(quantity.name, quantity))
        if quantity.name == "activations" and not quantity.bits:
            rows += _stage_rows(quantity)
        remarks += [f"{quantity.name}: {text}" for text in (*quantity.notes, *quantity.remarks)]
    lines = _columns(rows, rights=(1, 3, 4))
    if comparison.facts:
        facts = [["training step", left, comparison.right]]
        for name, fact in comparison.facts.items():
            if not isinstance(fact, str):
                facts.append([name, *(si(value, "B" if name.startswith("memory") else "FLOP") for value in fact)])
        lines += ["", *_columns(facts, rights=(1, 2))]
        lines += [f"{name}: {fact}" for name, fact in comparison.facts.items() if isinstance(fact, str)]
    return [*lines, *remarks]


def _row(name: str, quantity: Quantity, short: bool = False) -> list[str]:
    arrays = f"{len({difference.name for difference in quantity.differences})}"
    if quantity.bits:
        return [name, arrays, _BITS]
    state = "within" if quantity.equal else "apart"
    first = quantity.first or ""
    if short:  # the row already contains the layer
        first = first.rpartition(", layer ")[0].rpartition("/")[2]
    return [name, arrays, state, _size(quantity.absolute), _size(quantity.relative), first]


def _size(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "-"


def _stage_rows(quantity: Quantity) -> list[list[str]]:
    rows = [_row(f"  {name}", part, short=True) for name, part in _stages(quantity)]
    if len(rows) <= _LISTED:
        return rows
    half = _LISTED // 2
    return [*rows[:half], [f"  ... {len(rows) - 2 * half} more"], *rows[-half:]]


def _stages(quantity: Quantity) -> list[tuple[str, Quantity]]:
    """Returns groups of activations and their names. Activations of a layer form one group; any other activation is a
    group by itself. Consecutive layers with equal bits are merged."""
    stages = [(name, Quantity(name, list(group))) for name, group in itertools.groupby(quantity.differences, _stage)]
    rows: list[tuple[str, Quantity]] = []
    for same, group in itertools.groupby(stages, lambda item: item[1].bits and item[0].startswith("layer ")):
        run = list(group)
        if same and len(run) > 1:
            merged = [difference for _, part in run for difference in part.differences]
            rows.append((f"layers {run[0][0].split()[1]} to {run[-1][0].split()[1]}", Quantity("", merged)))
        else:
            rows += run
    return rows


def _stage(difference: Difference) -> str:
    return f"layer {difference.layer}" if difference.layer is not None else difference.name.replace("_", " ")


def _columns(rows: Sequence[Sequence[str]], rights: Sequence[int] = ()) -> list[str]:
    """Returns the lines of a table with aligned columns and the first row as heading. `rights`: the indices of
    right-aligned columns."""
    count = max(map(len, rows))
    filled = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in filled if len(row) > i) for i in range(count)]
    lines = []
    for row in filled:
        cells = [
            f"{cell:>{width}}" if i in rights else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]

"""What a comparison found, as data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.compare.difference import Difference, Tolerance


@dataclass(frozen=True)
class Quantity:
    """Arrays of one kind on two sides, in the order in which they are computed.

    `notes` say what else differs, each of which makes the sides unequal; `remarks` only inform.
    """

    name: str
    differences: Sequence[Difference]
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def bits(self) -> bool:
        """All arrays have equal bits, and nothing else differs."""
        return not self.notes and all(it.bits for it in self.differences)

    @property
    def equal(self) -> bool:
        """All arrays are equal in bits or within the tolerance, and nothing else differs."""
        return not self.notes and all(it.equal for it in self.differences)

    @property
    def absolute(self) -> float:
        """The largest absolute difference."""
        return max((it.absolute for it in self.differences), default=0.0)

    @property
    def relative(self) -> float:
        """The largest relative difference."""
        return max((it.relative for it in self.differences), default=0.0)

    @property
    def first(self) -> str | None:
        """Where the sides part first: what is not equal, else what has not the same bits; None where all has."""
        if self.notes:
            return self.notes[0]
        apart = [it for it in self.differences if not it.equal] or [it for it in self.differences if not it.bits]
        if not apart:
            return None
        missing = f" ({apart[0].note})" if math.isinf(apart[0].absolute) and apart[0].note else ""
        return apart[0].place + missing


@dataclass(frozen=True)
class Comparison:
    """The right side called `right` against the left one: what decides, and facts that only inform.

    `facts` are the two values of each, by name: numbers, or a sentence that stands for both.
    """

    right: str
    quantities: Sequence[Quantity]
    facts: Mapping[str, tuple[float, float] | str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Every quantity is equal, in bits or within the tolerance."""
        return all(quantity.equal for quantity in self.quantities)

    @property
    def bits(self) -> bool:
        """Every quantity has equal bits."""
        return all(quantity.bits for quantity in self.quantities)

    @property
    def first(self) -> str | None:
        """The first place where the sides are not equal, with its quantity."""
        return next((f"{it.name}: {it.first}" for it in self.quantities if not it.equal), None)


@dataclass(frozen=True)
class Report:
    """All comparisons of a command. `head` are labels and texts that say what was compared."""

    left: str
    tolerance: Tolerance
    head: Sequence[tuple[str, str]]
    comparisons: Sequence[Comparison]

    @property
    def equal(self) -> bool:
        """Every right side equals the left one."""
        return all(comparison.equal for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints: numbers that are not finite are the strings "inf" and "nan"."""
        return {
            "equal": self.equal,
            "left": self.left,
            "tolerance": self.tolerance._asdict(),
            "compared": [list(row) for row in self.head],
            "comparisons": [_comparison(it) for it in self.comparisons],
        }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "right": comparison.right,
        "equal": comparison.equal,
        "bits": comparison.bits,
        "first": comparison.first,
        "quantities": {it.name: _quantity(it) for it in comparison.quantities},
        "facts": {name: fact if isinstance(fact, str) else list(fact) for name, fact in comparison.facts.items()},
    }


def _quantity(quantity: Quantity) -> dict[str, Any]:
    return {
        "equal": quantity.equal,
        "bits": quantity.bits,
        "absolute": _number(quantity.absolute),
        "relative": _number(quantity.relative),
        "first": quantity.first,
        "notes": list(quantity.notes),
        "remarks": list(quantity.remarks),
        "arrays": [
            it._asdict() | {"absolute": _number(it.absolute), "relative": _number(it.relative)}
            for it in quantity.differences
        ],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)

"""The result of a comparison, as data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.compare.difference import Difference, Tolerance


@dataclass(frozen=True)
class Quantity:
    """The differences of one kind of array, in the order of computation.

    `notes` describe other differences that make the sides unequal; `remarks` describe differences that do not.
    """

    name: str
    differences: Sequence[Difference]
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def bits(self) -> bool:
        """Whether all arrays have equal bits and there are no notes."""
        return not self.notes and all(difference.bits for difference in self.differences)

    @property
    def equal(self) -> bool:
        """Whether all arrays are bit-identical or within the tolerance, and there are no notes."""
        return not self.notes and all(difference.equal for difference in self.differences)

    @property
    def absolute(self) -> float:
        """The largest absolute difference."""
        return max((difference.absolute for difference in self.differences), default=0.0)

    @property
    def relative(self) -> float:
        """The largest relative difference."""
        return max((difference.relative for difference in self.differences), default=0.0)

    @property
    def first(self) -> str | None:
        """The first note, otherwise the first unequal array, otherwise the first array with different bits; None if the
        sides have equal bits."""
        if self.notes:
            return self.notes[0]
        entry = self.entry
        if entry is None:
            return None
        missing = f" ({entry.note})" if math.isinf(entry.absolute) and entry.note else ""
        return entry.where + missing

    @property
    def entry(self) -> Difference | None:
        """The first unequal array, otherwise the first array with different bits; None if all arrays have equal
        bits."""
        apart = [d for d in self.differences if not d.equal] or [d for d in self.differences if not d.bits]
        return apart[0] if apart else None


@dataclass(frozen=True)
class Comparison:
    """The comparison of the left side with the right side `right`.

    `facts` maps the name of a fact about the compiled step to a pair of numbers (left, right) or to a phrase about both
    sides. Facts do not affect equality.
    """

    right: str
    quantities: Sequence[Quantity]
    facts: Mapping[str, tuple[float, float] | str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether every quantity is bit-identical or within the tolerance."""
        return all(quantity.equal for quantity in self.quantities)

    @property
    def bits(self) -> bool:
        """Whether every quantity has equal bits."""
        return all(quantity.bits for quantity in self.quantities)

    @property
    def first(self) -> str | None:
        """The first difference that makes the sides unequal, with the name of the quantity; None if the sides are
        equal."""
        return next((f"{quantity.name}: {quantity.first}" for quantity in self.quantities if not quantity.equal), None)

    @property
    def first_within(self) -> str | None:
        """The first array with different bits, with the name of its quantity, if this array is within the tolerance;
        None otherwise."""
        quantity, entry = self._first_bits
        return f"{quantity.name}: {entry.where}" if quantity and entry and entry.equal else None

    @property
    def unsown(self) -> Difference | None:
        """The first array with different bits, if this array is the output of a layer and no other array of the layer
        is compared; None otherwise."""
        quantity, entry = self._first_bits
        if not (quantity and entry) or quantity.name != "activations" or entry.layer is None:
            return None
        block, _, last = entry.name.rpartition("/")
        inner = (d for d in quantity.differences if d.layer == entry.layer and d.name.startswith(f"{block}/"))
        return entry if last == "output" and list(inner) == [entry] else None

    @property
    def _first_bits(self) -> tuple[Quantity | None, Difference | None]:
        """The first quantity with different bits, and its first array with different bits (None if there are notes)."""
        quantity = next((quantity for quantity in self.quantities if not quantity.bits), None)
        if quantity is None or quantity.notes:
            return quantity, None
        return quantity, next(difference for difference in quantity.differences if not difference.bits)


@dataclass(frozen=True)
class Report:
    """All comparisons of a command. `head` consists of labels and texts that describe what was compared."""

    left: str
    tolerance: Tolerance
    head: Sequence[tuple[str, str]]
    comparisons: Sequence[Comparison]

    @property
    def equal(self) -> bool:
        """Whether every right side equals the left one."""
        return all(comparison.equal for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """Returns the output of `--json`. Numbers that are not finite become the strings "inf" and "nan"."""
        return {
            "equal": self.equal,
            "left": self.left,
            "tolerance": self.tolerance._asdict(),
            "compared": [list(row) for row in self.head],
            "comparisons": [_comparison(comparison) for comparison in self.comparisons],
        }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "right": comparison.right,
        "equal": comparison.equal,
        "bits": comparison.bits,
        "first": comparison.first,
        "first_within": comparison.first_within,
        "quantities": {quantity.name: _quantity(quantity) for quantity in comparison.quantities},
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
            difference._asdict() | {"absolute": _number(difference.absolute), "relative": _number(difference.relative)}
            for difference in quantity.differences
        ],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)

"""Groups those points of a space that `trainer.train` accepts into families. The points of a family differ only in
their rows, that is, in per_device_batch_size and gradient_accumulation_steps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from trainer.config.check import contradictions
from trainer.config.errors import UserError, report
from trainer.config.keys import Config, Values
from trainer.config.resolve import resolved
from trainer.planning.guess import Guess, Guesses
from trainer.planning.space import ROWS, SHARDING, Changes, Dimension, Space
from trainer.sharding import hardware, make_mesh

BATCH_ROWS, STEPS = "per_device_batch_size", "gradient_accumulation_steps"


@dataclass
class Family:
    """Points that differ only in their rows, fewest rows first."""

    points: list[Changes]
    guesses: list[Guess]  # one for each point, without corrections (`Guesses.of`)
    beyond: int  # the smallest index that is known not to fit, or the number of points
    fits: int = -1  # the largest index that is known to fit
    done: set[int] = field(default_factory=set)  # the indices that the search has handled

    @property
    def open(self) -> list[int]:
        """The indices that the search has neither handled nor excluded."""
        return [i for i in range(self.beyond) if i not in self.done]


class Checks:
    """The checks of `trainer.train`, for the points of one plan."""

    def __init__(self, config: Config, devices: Sequence[jax.Device]):
        """`config`: not resolved."""
        self._given, self._devices, self._hardware = dict(config.items()), devices, hardware(devices)

    def value(self, changes: Changes, key: str) -> Any:
        """Returns the value of a key at a point."""
        return changes[key] if key in changes else self._given[key]

    def resolved(self, changes: Changes) -> Values:
        """Returns the resolved values of a point. Raises UserError if `trainer.train` refuses it."""
        values = Values({**self._given, **changes})
        if mistakes := contradictions(values, dict.fromkeys(values, "plan"), set()):
            raise report(mistakes)
        return resolved(values, **self._hardware)

    def refusal(self, changes: Changes) -> str:
        """Returns why `trainer.train` refuses a point; "" if it does not."""
        try:
            self.resolved(changes)
        except UserError as error:
            return a_mistake(error)
        return ""

    def network_refuses(self, mesh: Changes) -> str:
        """Returns why the network of the devices cannot form a mesh; "" if it can."""
        try:
            make_mesh(Values({**self._given, **mesh}), self._devices)
        except UserError as error:
            return str(error).partition(":")[0]
        return ""


def families(space: Space, checks: Checks, guesses: Guesses, refuse: Callable[[str, int], object]) -> Iterator[Family]:
    """Yields the families of a space, without most of the points that `trainer.train` refuses. The search finds the
    other refused points one by one.

    A mesh is left out if the network of the devices cannot form it. To leave out more points quickly, only a few points
    are checked:
    - A pair of a mesh and rows is left out if two points with this pair are refused for the same reason: with the first
      choice of every other dimension, and with the last choice of every other dimension.
    - A choice of another dimension is left out if four points with this choice are refused for the same reason: with
      the first and with the last remaining pair, each with the first and with the last choices of the other dimensions.

    Args:
      refuse: called with a reason and the number of points that are left out for this reason.
    """
    meshes, rows = (next(d for d in space.dimensions if d.name == name) for name in (SHARDING, ROWS))
    others = Space(tuple(d for d in space.dimensions if d.name not in (SHARDING, ROWS)))
    pairs: list[tuple[Changes, list[Changes]]] = []
    for mesh in meshes.choices:
        if reason := checks.network_refuses(mesh):
            refuse(reason, len(rows.choices) * others.size)
            continue
        allowed: list[Changes] = []
        for choice in rows.choices:
            if reason := _always(checks, [{**mesh, **choice, **end} for end in _ends(others)]):
                refuse(reason, others.size)
            else:
                allowed.append(choice)
        if allowed:
            pairs.append((mesh, allowed))
    others = _accepted(others, pairs, checks, refuse)
    for mesh, allowed in pairs:
        for other in others.points():
            # A family never mixes points with and without accumulation: because of the sums of gradients, a point with
            # accumulation may need more memory than a point with more rows but without accumulation.
            for accumulates in (False, True):
                points: list[Changes] = [{**mesh, **choice, **other} for choice in allowed]
                points = [point for point in points if (checks.value(point, STEPS) > 1) == accumulates]
                points.sort(key=lambda point: checks.value(point, BATCH_ROWS))
                if points:
                    yield Family(points, [guesses.of(point) for point in points], len(points))


def _accepted(
    others: Space,
    pairs: Sequence[tuple[Changes, Sequence[Changes]]],
    checks: Checks,
    refuse: Callable[[str, int], object],
) -> Space:
    """Returns `others` without the choices that `families` leaves out."""
    if not pairs:
        return others
    (mesh, rows), (last_mesh, last_rows) = pairs[0], pairs[-1]
    places = {**mesh, **rows[0]}, {**last_mesh, **last_rows[-1]}
    count, kept = sum(len(allowed) for _, allowed in pairs), others
    for dimension in others.dimensions:
        choices = []
        for choice in dimension.choices:
            points = [{**place, **end, **choice} for place in places for end in _ends(kept)]
            if reason := _always(checks, points):
                refuse(reason, count * kept.size // len(dimension.choices))
            else:
                choices.append(choice)
        if not choices:
            return Space((Dimension(dimension.name, ()),))
        at = [d.name for d in kept.dimensions].index(dimension.name)
        dimensions = (*kept.dimensions[:at], Dimension(dimension.name, tuple(choices)), *kept.dimensions[at + 1 :])
        kept = Space(dimensions)
    return kept


def _ends(space: Space) -> list[Changes]:
    """Returns the point with the first choice of every dimension, and the point with the last."""
    return [
        next(Space(tuple(Dimension(d.name, d.choices[i:][:1]) for d in space.dimensions)).points()) for i in (0, -1)
    ]


def _always(checks: Checks, points: Sequence[Changes]) -> str:
    """Returns the reason if all points are refused for the same reason; else ""."""
    reason = checks.refusal(points[0])
    return reason if reason and all(checks.refusal(point) == reason for point in points[1:]) else ""


def a_mistake(error: UserError) -> str:
    """Returns the last of the mistakes that an error about a configuration lists."""
    return str(error).splitlines()[-1].strip()

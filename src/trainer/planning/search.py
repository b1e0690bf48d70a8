"""Finds the best configuration of a space: excludes points by proven bounds, and compiles the most promising others."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from trainer.aot.chips import Chip, chip_of
from trainer.aot.topologies import devices_of, topology_of
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.planning.bounds import Bounds
from trainer.planning.candidate import FAILED, FITS, TOO_LARGE, Candidate
from trainer.planning.compilation import Compiler
from trainer.planning.families import BATCH_ROWS, STEPS, Checks, Family, a_mistake, families
from trainer.planning.guess import Guesses
from trainer.planning.journal import Journal, default_path, program_key
from trainer.planning.space import BATCH, TOKENS, Changes, Space

Compile = Callable[[Config], Mapping[str, Any]]


@dataclass
class Counts:
    """The numbers of points in a space, by outcome."""

    points: int = 0
    refused: int = 0  # refused by the checks of trainer.train
    same: int = 0  # the same program as another point
    too_large: int = 0  # excluded by a proven bound on memory, or because a point with fewer rows does not fit
    worse: int = 0  # worse than the best point, by a proven bound on time or because of a smaller batch
    compiled: int = 0
    known: int = 0  # compiled earlier: the result is from the journal
    failed: int = 0

    @property
    def left(self) -> int:
        """The number of points that were not reached."""
        return self.points - self.refused - self.same - self.too_large - self.worse - self.compiled - self.known


class Search:
    """A search, which `run` executes. `candidates` and `counts` are always valid, even after an interruption."""

    def __init__(
        self,
        config: Config,
        space: Space,
        devices: Sequence[jax.Device],
        journal: Journal,
        compiler: Compile,
        *,
        objective: str = TOKENS,
        limit: int = 24,
        chip: Chip | None = None,
    ):
        """See `plan` for the other arguments. `chip`: memory and speed of a device; None: looked up by device kind."""
        chip = chip or chip_of(devices[0].device_kind)
        if chip is None:
            raise UserError(
                f"compile_topology={config.compile_topology}: its memory and speed are unknown; give TPUs or GPUs"
            )
        self.config, self.devices, self.chip, self.objective, self.limit = config, devices, chip, objective, limit
        self.journal, self.compiler = journal, compiler
        self.candidates: list[Candidate] = []
        self.refusals: dict[str, int] = {}  # the number of refused points by reason
        self.counts = Counts(points=space.size)
        self.least_excess = 0  # the smallest excess over a device's memory, in bytes, of the points excluded by a bound
        self._bounds = Bounds(devices)
        self._guesses = Guesses(config, chip, len(devices))
        self._programs: set[str] = set()
        self._checks = Checks(config, devices)
        self._families = [*families(space, self._checks, self._guesses, self._refuse)]
        self._heap: list[tuple[tuple[float, ...], int, int]] = []  # (score, family, index), the most promising first

    @property
    def best(self) -> Candidate | None:
        """The best candidate that fits and has a time estimate that is not only a lower bound. None without such a
        candidate."""
        ranked = [
            found for found in self.candidates if found.outcome == FITS and found.seconds and not found.lower_bound
        ]
        return max(ranked, key=self.merit, default=None)

    def merit(self, candidate: Candidate) -> tuple[float, ...]:
        """Returns the figures that the objective maximizes, the most important first."""
        speed = candidate.tokens_per_second
        return (speed,) if self.objective == TOKENS else (candidate.tokens, speed)

    def run(
        self,
        starts: Callable[[Changes], object] = lambda changes: None,
        ends: Callable[[Candidate], object] = lambda candidate: None,
    ) -> None:
        """Compiles points until no better point can exist, or the limit is reached.

        Args:
          starts: called before each compilation.
          ends: called with each result, including results from the journal.

        Raises:
          UserError: every point is refused; the message has the most frequent reason.
        """
        self._rank()
        while self.counts.compiled + self.counts.known < self.limit and self._heap:
            _, number, index = heapq.heappop(self._heap)
            family = self._families[number]
            changes = family.points[index]
            family.done.add(index)
            key = self._worth(family, index)
            if key is None or key in self._programs:
                self.counts.same += key is not None
                self._push(number)
                continue
            self._programs.add(key)
            row = self.journal.rows.get(key)
            if row is None or row["again"]:
                starts(changes)
                row = {"key": key, "changes": dict(changes), **self.compiler(Config({**self.config, **changes}))}
                self.journal.add(row)
                self.counts.compiled += 1
            else:
                self.counts.known += 1
            self._take(family, index, Candidate(dict(changes), row["outcome"], self.tokens(changes), row))
            self._rank()
            ends(self.candidates[-1])
        if self.refusals and self.counts.refused == self.counts.points:
            reason = max(self.refusals, key=lambda text: self.refusals[text])
            share = f"{self.refusals[reason]:,} of {self.counts.points:,} points"
            raise UserError(f"no point of the space can be trained; {share}: {reason}")

    def keep_fewest_rows(self) -> None:
        """Keeps only the point with the fewest rows in each family."""
        for family in self._families:
            self.counts.points -= len(family.points) - 1
            del family.points[1:], family.guesses[1:]
            family.beyond = 1

    def tokens(self, changes: Changes) -> int:
        """Returns the tokens per update, over all devices."""
        rows, steps, length = (self._checks.value(changes, key) for key in (BATCH_ROWS, STEPS, "max_target_length"))
        return round(rows * len(self.devices)) * steps * length

    def _rank(self) -> None:
        """Orders the families by their guesses, which every compilation changes."""
        self._heap = []
        for number in range(len(self._families)):
            self._push(number)

    def _push(self, number: int) -> None:
        """Adds the most promising open point of a family to the heap.

        This is the point with the most rows among the points that probably fit. If no point probably fits, it is the
        midpoint between the points known to fit and the points known not to fit, or the point with the fewest rows if
        no point is known to fit.
        """
        family = self._families[number]
        if not (indices := family.open):
            return
        factors = self._guesses.factors(family.points[0])
        larger = [i for i in indices if i > family.fits]
        likely = [i for i in larger if family.guesses[i].memory * factors.memory <= self.chip.usable]
        if likely or not larger:
            index = (likely or indices)[-1]
        else:
            index = larger[(len(larger) - 1) // 2 if family.fits >= 0 else 0]
        guess, tokens = family.guesses[index].times(factors), self.tokens(family.points[index])
        speed = tokens / guess.seconds
        merit = (-speed,) if self.objective == TOKENS else (-tokens, -speed)
        heapq.heappush(self._heap, ((float(guess.memory > self.chip.usable), *merit), number, index))

    def _refuse(self, reason: str, points: int = 1) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + points
        self.counts.refused += points

    def _worth(self, family: Family, index: int) -> str | None:
        """Returns a point's `program_key`; None if the point is refused, too large, or worse than the best point."""
        changes = family.points[index]
        try:
            config = Config(self._checks.resolved(changes))
            bound = self._bounds.of(config)
        except UserError as error:
            self._refuse(a_mistake(error))
            return None
        if (excess := bound.memory - self.chip.usable) > 0:
            self._exclude(family, index)
            self.counts.too_large += 1
            self.least_excess = min(self.least_excess or excess, excess)
            return None
        best, tokens = self.best, self.tokens(changes)
        if best and (
            tokens < best.tokens
            if self.objective == BATCH
            else bound.seconds and tokens / bound.seconds < best.tokens_per_second
        ):
            self.counts.worse += 1
            return None
        return program_key(config)

    def _exclude(self, family: Family, index: int) -> None:
        """Excludes the points with more rows than the point `index`, because this point does not fit."""
        self.counts.too_large += sum(i > index for i in family.open)
        family.beyond = min(family.beyond, index)

    def _take(self, family: Family, index: int, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        if candidate.outcome == FAILED:
            self.counts.failed += 1
            return
        assert candidate.memory
        self._guesses.learn(family.points[index], candidate.seconds, candidate.memory)
        if candidate.outcome == FITS:
            family.fits = max(family.fits, index)
        else:
            self._exclude(family, index)


def plan(config: Config, space: Space, journal: Journal | None = None, **options: Any) -> list[Candidate]:
    """Returns the compiled points of a space, the best first, then points that do not fit, then failures.

    Args:
      config: from `config.load`, not resolved, with compile_topology.
      space: see `space.default_space`.
      journal: contains earlier results; new results are added to it. None: the file base_output_directory/plan.jsonl.
      options: `objective` and `limit` of `Search`.

    Raises:
      UserError: every point is refused, or the journal cannot be written.
    """
    journal = journal or Journal(default_path(config))
    devices = devices_of(topology_of(config), config.compile_topology_num_slices)
    search = Search(config, space, devices, journal, Compiler(), **options)
    search.run()
    return ranked(search)


def ranked(search: Search) -> list[Candidate]:
    """Returns the candidates of a search, the best first."""
    order = {FITS: 0, TOO_LARGE: 1, FAILED: 2}
    return sorted(
        search.candidates,
        key=lambda found: (order[found.outcome], found.lower_bound, *(-value for value in search.merit(found))),
    )

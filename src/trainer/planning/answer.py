"""A plan's answer as text and as JSON: the best configurations, the command that trains the best of them, and why the
others lost.

Every figure of a candidate is in the candidate's row of the journal, or is computed from such figures and the tokens of
an update, which the settings determine.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.aot.text import gib
from trainer.config.capabilities.compile_keys import ROWS as COMPILE_ROWS
from trainer.config.dump import as_words
from trainer.config.environment import PREFIX
from trainer.config.from_model import command_of
from trainer.config.schema import plain_name
from trainer.config.words import counted
from trainer.observe.text import short_time, si
from trainer.planning.candidate import FAILED, FITS, TOO_LARGE, Candidate
from trainer.planning.larger import Larger
from trainer.planning.search import Search, ranked
from trainer.planning.settings import AS_GIVEN, settings_text
from trainer.planning.space import BATCH, ROWS, Changes, Space

SHOWN = 10  # rows of the table
_COMPILE_KEYS = {key for row in COMPILE_ROWS for key in row.names}


def line_of(candidate: Candidate) -> str:
    """Returns a line with a candidate's figures and settings."""
    settings = settings_text(candidate.changes)
    if candidate.outcome == FAILED:
        return f"{'failed':>14}  {settings}: {candidate.row['reason']}"
    memory = gib(candidate.memory or 0)
    if candidate.outcome == TOO_LARGE:
        return f"{'does not fit':>14}  {memory:>10}  {gib(candidate.excess)} too much  {settings}"
    if not candidate.seconds:
        return f"{'no estimate':>14}  {memory:>10}  {settings}"
    at_least = ">" if candidate.lower_bound else ""
    bound = candidate.row["report"]["estimate"]["bound"]
    speed, time = si(candidate.tokens_per_second, "tok/s"), short_time(candidate.seconds)
    return f"{speed:>14}  {memory:>10}  {at_least}{time:>8} {bound:<8}  {settings}"


def answer_text(search: Search, space: Space, words: Sequence[str]) -> str:
    """Returns the answer for a terminal. `words`: the plan's command line, without the plan's options."""
    return "\n".join([*_head(search), *_table(search), *_command(search, words), *_lost(search, space)])


def answer_json(search: Search, space: Space, words: Sequence[str], larger: Larger | None = None) -> dict[str, Any]:
    """Returns the answer as a dict of plain data.

    Its keys are `command`, `best`, `candidates`, `counts`, `lost`, `refused` and `larger`.
    """
    best = search.best
    return {
        "command": " ".join(command(search, words, best.changes)) if best else None,
        "best": _plain(best) if best else None,
        "candidates": [_plain(found) for found in ranked(search)],
        "counts": vars(search.counts) | {"left": search.counts.left},
        "lost": [{"settings": settings, "reason": reason} for settings, reason in losers(search, space)],
        "refused": search.refusals,
        "larger": larger and {"topology": larger.topology, "slices": larger.slices, **_plain(larger.candidate)},
    }


def command(search: Search, words: Sequence[str], changes: Changes) -> list[str]:
    """Returns the command that trains with the settings `changes`.

    The command has the plan's arguments `words`, without keys in `changes` and keys that only concern compilation,
    followed by the settings in `changes` that differ from the plan's configuration. If the environment variable M_KEY
    of one of these settings exists, the command unsets the variable, because `trainer.train` refuses a key with two
    values.
    """
    names = {word: plain_name(word.partition("=")[0]) for word in words}
    kept = [word for word in words if names[word] not in (*_COMPILE_KEYS, *changes)]
    dropped = set(names.values()) - {names[word] for word in kept}
    differs = {key: value for key, value in changes.items() if key in dropped or value != search.config[key]}
    variables = [f"{PREFIX}{key.upper()}" for key in differs if f"{PREFIX}{key.upper()}" in os.environ]
    unset = ["env", *(word for name in variables for word in ("-u", name))] if variables else []
    return [*unset, "python", "-m", command_of(search.config), *map(shlex.quote, (*kept, *as_words(differs)))]


def _plain(found: Candidate) -> dict[str, Any]:
    figures = {"tokens": found.tokens, "tokens_per_second": found.tokens_per_second, "lower_bound": found.lower_bound}
    return {"changes": dict(found.changes), "outcome": found.outcome, **figures, "row": found.row}


def _head(search: Search) -> Iterator[str]:
    counts = search.counts
    yield ""
    parts = {
        "refused by the checks of trainer.train": counts.refused,
        "too large, by a bound on memory or because a point with fewer rows does not fit": counts.too_large,
        "worse than the best by a bound": counts.worse,
        "the same program as another": counts.same,
        "from the journal": counts.known,
        "compiled": counts.compiled,
        "not reached": counts.left,
    }
    shown = [f"{count:,} {what}" for what, count in parts.items() if count]
    yield f"{counted(counts.points, 'point')}: {', '.join(shown)}"
    if search.refusals:
        reason = max(search.refusals, key=lambda text: search.refusals[text])
        yield f"  most refusals ({search.refusals[reason]:,}): {reason}"
    if counts.left and search.best:
        yield f"  a point that was not reached could be better; {_continues(search)}"


def _continues(search: Search) -> str:
    ended = search.counts.compiled + search.counts.known >= search.limit
    return f"compiles={2 * search.limit} continues" if ended else "the same command continues"


def _table(search: Search) -> Iterator[str]:
    rows = ranked(search)
    fitting = [found for found in rows if found.outcome == FITS and not found.lower_bound]
    yield ""
    if fitting:
        yield f"{'tokens':>14}  {'memory':>10}  {'a step':>8} {'bound by':<8}  settings"
    for found in fitting[:SHOWN]:
        yield line_of(found)
    if bounds := [found for found in rows if found.outcome == FITS and found.lower_bound]:
        yield ""
        yield "lower bounds: a loop's trip count is unknown and counted as 1, so these points are not ranked"
        for found in bounds[:SHOWN]:
            yield line_of(found)
    if not fitting and not bounds:
        yield from _nothing_fits(search)
    for found in rows:
        if found.outcome == FAILED:
            yield line_of(found)


def larger_text(found: Larger | None) -> str:
    """Returns a line about the result of `planning.larger.smallest_that_fits`."""
    if found is None:
        return "the model fits on none of the next larger topologies of this kind that were tried"
    slices = f" compile_topology_num_slices={found.slices}" if found.slices > 1 else ""
    settings = settings_text(found.candidate.changes)
    return f"the next larger topology on which it fits: compile_topology={found.topology}{slices}, with {settings}"


def _nothing_fits(search: Search) -> Iterator[str]:
    too_large = [found for found in search.candidates if found.outcome == TOO_LARGE]
    if too_large:
        least = min(too_large, key=lambda found: found.excess)
        yield f"nothing that was compiled fits; the smallest excess is {gib(least.excess)} on each device:"
        yield line_of(least)
    elif search.least_excess and not search.counts.failed:
        yield f"nothing fits: every point needs at least {gib(search.least_excess)} more than a device has, by a bound"
    if search.counts.left:
        yield f"  {search.counts.left:,} points were not reached, and one of them may fit; {_continues(search)}"
    if search.counts.failed:
        yield f"{counted(search.counts.failed, 'compilation')} failed:"


def _command(search: Search, words: Sequence[str]) -> Iterator[str]:
    if search.best:
        yield ""
        yield " ".join(command(search, words, search.best.changes))


def _lost(search: Search, space: Space) -> Iterator[str]:
    lines = [f"  {settings}: {reason}" for settings, reason in losers(search, space)]
    if lines:
        yield from ("", "why others lost:", *lines)


def losers(search: Search, space: Space) -> Iterator[tuple[str, str]]:
    """Yields pairs of texts: a setting that was compiled but is not the winner's, and how the best candidate with this
    setting compares with the winner."""
    best = search.best
    if best is None:
        return
    for dimension in space.dimensions:
        if dimension.name == ROWS:
            continue
        for choice in dimension.choices:
            if _has(best.changes, choice, dimension.choices):
                continue
            found = [other for other in search.candidates if _has(other.changes, choice, dimension.choices)]
            if found:
                shown = settings_text(choice)
                yield f"no {dimension.name}" if shown == AS_GIVEN else shown, _reason(search, found, best)


def _has(changes: Changes, choice: Changes, choices: Sequence[Changes]) -> bool:
    """Returns whether a point's settings `changes`, restricted to the keys that a dimension's `choices` set, equal
    `choice`."""
    keys = {key for other in choices for key in other}
    return {key: value for key, value in changes.items() if key in keys} == dict(choice)


def _reason(search: Search, found: Sequence[Candidate], best: Candidate) -> str:
    fitting = [other for other in found if other.outcome == FITS and other.seconds and not other.lower_bound]
    if not fitting:
        too_large = [other for other in found if other.outcome == TOO_LARGE]
        if too_large:
            least = min(too_large, key=lambda other: other.excess)
            return f"does not fit: {gib(least.excess)} too much with {settings_text(least.changes)}"
        if all(other.outcome == FAILED for other in found):
            return f"failed: {found[0].row['reason']}"
        return "only lower bounds" if any(other.lower_bound for other in found) else "no estimate of the time"
    other = max(fitting, key=search.merit)
    if search.objective == BATCH and other.tokens < best.tokens:
        return f"at most {other.tokens:,} tokens per update, instead of {best.tokens:,}"
    slower = best.tokens_per_second / other.tokens_per_second
    parts = {part: value / best.per_token[part] for part, value in other.per_token.items() if best.per_token[part]}
    part, most = max(parts.items(), key=lambda item: item[1], default=("", 1.0))
    why = f", {most:.3g} times the {part}" if most > 1.02 else ""
    return f"{slower:.3f} times the time per token{why}" if slower >= 1.0005 else f"equally fast{why}"

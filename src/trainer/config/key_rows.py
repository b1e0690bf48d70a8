"""The key properties that code defines: one row for each group of keys that are treated alike.

A file of capabilities/ defines for its keys: these rows (ROWS), checks of their values (CHECKS), and the settings under
which they have no effect (INERT, or INERT_HERE if this depends on the devices). base.yml specifies type, choices, range
and meaning of the values. A key without a row must not change on resume, and affects the compiled step.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from trainer.config.keys import Config

Problem = Callable[[Config], str | None]  # (config) -> what is wrong, or None
Check = tuple[Sequence[str], Problem]  # the keys whose values a message shows, and the function that checks them


def refused(keys: Sequence[str], when: Callable[[Config], object], why: str) -> Check:
    """Returns the check that fails with the message `why` if `when(config)` is true."""
    return keys, lambda config: why if when(config) else None


def left_out(key: str, reason: str) -> Check:
    """Returns the check that `key` has no value, that is 0, false, empty or null."""
    return refused((key,), lambda c: c[key], f"{reason}; leave it out")


def only_if(when: Callable[[Config], object], checks: Iterable[Check], shown: Sequence[str] = ()) -> list[Check]:
    """Returns `checks`, for configurations in which `when(config)` is true. Messages also show the keys `shown`."""

    def narrowed(problem: Problem) -> Problem:
        return lambda config: problem(config) if when(config) else None

    return [((*shown, *keys), narrowed(problem)) for keys, problem in checks]


class Inert(NamedTuple):
    """`keys` have no effect if `when(config)` is true. `reason` is a text with the settings that cause this."""

    keys: Sequence[str]
    when: Callable[[Config], object]
    reason: str


class Resume(Enum):
    """The changes that are allowed between a checkpoint and the command that resumes from it.

    Attributes:
      SAME: no change.
      LAYOUT: any change. How the program is sharded, which affects results only by summation order and rounding.
      SAME_BITS: any change. How the program is sharded or where it runs, without any effect on bits.
      BATCH: any other split of the same global batch.
      LENGTH: any length of the run. The schedule follows the length unless the schedule's length is given.
      AROUND: any change. What to write, keep, print and evaluate, and how to treat a bad step.
      UPDATE: how gradients become an update. May change only with reset_optimizer, which resets that state.
      TIMETABLE: like UPDATE. When fragments of DiLoCo synchronize.
    """

    SAME, LAYOUT, SAME_BITS, BATCH, LENGTH, AROUND, UPDATE, TIMETABLE = range(8)


class Place(Enum):
    """Where a path may lead.

    Attributes:
      LOCAL: to this machine.
      DATA: to files of data on this machine or elsewhere: a list of globs and URLs.
      BUCKET: to this machine or to a gs:// bucket.
      ANY: only its syntax is checked here.
    """

    LOCAL, DATA, BUCKET, ANY = range(4)


class Row(NamedTuple):
    """The properties of the keys `names`.

    Attributes:
      resume: the changes that are allowed on resume.
      step: whether the compiled step depends on their resolved values.
      path: where the path may lead, if the values are paths.
      code: whether a value makes a program run code that is not part of the trainer.
    """

    names: Sequence[str]
    resume: Resume = Resume.SAME
    step: bool = True
    path: Place | None = None
    code: bool = False


def regexes(key: str) -> Check:
    """Returns the check of a list of regular expressions."""

    def problem(config: Config) -> str | None:
        for pattern in config[key] or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{pattern!r} is not a regular expression: {error}"
        return None

    return (key,), problem

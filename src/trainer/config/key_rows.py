"""The types that describe keys in code. A `Row` describes a group of keys with the same properties.

Each file of capabilities/ defines rows for its keys (ROWS), checks of their values (CHECKS), and the settings under
which the keys have no effect (INERT, or INERT_HERE for settings that depend on the devices). base.yml specifies the
type, choices, range and meaning of each key. A key without a row must not change on resume, and counts as affecting the
compiled step.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from trainer.config.keys import Config

Problem = Callable[[Config], str | None]  # (config) -> what is wrong, or None
Check = tuple[Sequence[str], Problem]  # the keys whose values a message shows, and the function that checks them


def refused(keys: Sequence[str], when: Callable[[Config], object], why: str) -> Check:
    """Returns the check of `keys` that fails with the message `why` if `when(config)` is true."""
    return keys, lambda config: why if when(config) else None


def left_out(key: str, reason: str) -> Check:
    """Returns the check that `key` is 0, false, empty or null."""
    return refused((key,), lambda c: c[key], f"{reason}; leave it out")


def only_if(when: Callable[[Config], object], checks: Iterable[Check], shown: Sequence[str] = ()) -> list[Check]:
    """Returns `checks` that apply only if `when(config)` is true. Their messages also show the keys in `shown`."""

    def narrowed(problem: Problem) -> Problem:
        return lambda config: problem(config) if when(config) else None

    return [((*shown, *keys), narrowed(problem)) for keys, problem in checks]


class Inert(NamedTuple):
    """`keys` have no effect if `when(config)` is true. `reason` names the settings that cause this."""

    keys: Sequence[str]
    when: Callable[[Config], object]
    reason: str


class Resume(Enum):
    """The changes of a key that are allowed between a checkpoint and the command that resumes from it.

    Attributes:
      SAME: no change.
      LAYOUT: any change. The key affects how the program is sharded, and affects results only by summation order and
        rounding.
      SAME_BITS: any change. The key affects how the program is sharded or where it runs, but no bit of the results.
      BATCH: any change that splits the same global batch differently.
      LENGTH: any change. The key sets the length of the run or of its learning rate schedule, which by default has the
        length of the run.
      AROUND: any change. The key affects what a run writes, keeps, prints and evaluates, and how it treats a bad step.
      UPDATE: a change only with reset_optimizer, which resets the optimizer state. The key affects how gradients become
        an update.
      TIMETABLE: a change only with reset_optimizer. The key affects when fragments of DiLoCo synchronize.
    """

    SAME, LAYOUT, SAME_BITS, BATCH, LENGTH, AROUND, UPDATE, TIMETABLE = range(8)


class Place(Enum):
    """Where a path may lead.

    Attributes:
      LOCAL: to this machine.
      DATA: to files of data on this machine or elsewhere: a list of globs and URLs.
      BUCKET: to this machine or to a gs:// bucket.
      ANY: anywhere; only the path's syntax is checked.
    """

    LOCAL, DATA, BUCKET, ANY = range(4)


class Row(NamedTuple):
    """The properties of the keys `names`.

    Attributes:
      resume: the changes that are allowed on resume.
      step: whether the compiled step depends on the keys' resolved values.
      path: where the path may lead, if the values are paths.
      code: whether a value makes a program run code that is not part of the trainer.
    """

    names: Sequence[str]
    resume: Resume = Resume.SAME
    step: bool = True
    path: Place | None = None
    code: bool = False


def regexes(key: str) -> Check:
    """Returns the check that the value of `key` is a list of valid regular expressions."""

    def problem(config: Config) -> str | None:
        for pattern in config[key] or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{pattern!r} is not a regular expression: {error}"
        return None

    return (key,), problem

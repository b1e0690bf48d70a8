"""Mistakes of the user, and how an entry point ends on one."""

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UserError(ValueError):
    """A user's mistake. The message says what is wrong, where, and what the nearest valid choice is."""


class NotBuilt(UserError, NotImplementedError):
    """A setting that has a meaning but no implementation here yet, alone or among other mistakes."""


class Unbuilt(str):
    """The message of a mistake that asks for what is not built yet; `report` makes a NotBuilt of it."""


class RunStopped(RuntimeError):
    """What ends a run by the run's own rules, such as a loss of NaN. The message says what to do."""


def exit_on_user_error(main: Callable[P, R]) -> Callable[P, R]:
    """Decorates an entry point: a UserError prints its message on stderr and exits with code 2, without a traceback.

    RunStopped does the same with code 1. Ctrl-C ends with code 130 and a reader of the output that went away (`| head`)
    with 141, as a shell would have it. Every other exception passes.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except RunStopped as error:
            print(f"stopped: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:
            # Python flushes stdout once more at its end, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None

    return wrapped


def report(mistakes: Sequence[str]) -> UserError:
    """One error for all `mistakes` of a stage, one line each; a NotBuilt if one of them is `Unbuilt`."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    kind = NotBuilt if any(isinstance(mistake, Unbuilt) for mistake in mistakes) else UserError
    return kind("\n  ".join([f"{count} in the configuration:", *mistakes]))


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of a message, `; nearest: NAME`, or nothing where no name resembles `word`."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.4)
    return f"; nearest: {close[0]}" if close else ""


def shortened(text: str) -> str:
    """`text` on one line, for a message; its beginning where it is long."""
    line = " ".join(text[:400].split())
    return line if len(line) <= 80 and len(text) <= 400 else f"{line[:77]}..."

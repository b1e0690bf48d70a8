"""Mistakes of the user, and how an entry point ends on one."""

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UserError(ValueError):
    """A user's mistake. The message says what is wrong, where, and what the nearest valid choice is."""


def exit_on_user_error(main: Callable[P, R]) -> Callable[P, R]:
    """Decorates an entry point: a UserError prints its message on stderr and exits with code 2, without a traceback.

    Every other exception passes.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    return wrapped


def report(mistakes: Sequence[str]) -> UserError:
    """One error for all `mistakes` of a stage, one line each."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    return UserError("\n  ".join([f"{count} in the configuration:", *mistakes]))


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of a message, `; nearest: NAME`, or nothing where no name resembles `word`."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.4)
    return f"; nearest: {close[0]}" if close else ""

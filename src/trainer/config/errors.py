"""Mistakes of the user, and how an entry point ends on one."""

import _thread
import contextlib
import difflib
import functools
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SURROGATE = re.compile("[\ud800-\udfff]")
_MOMENT = 0.01  # seconds
# No message is longer than this.
SCREEN_LINES, SCREEN_COLUMNS = 40, 160


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

    Where the package left Ctrl-C to the system (see `trainer/__init__.py`) it stays with it until `take_interrupts`,
    and is the system's again when `main` ends: the process ends without waiting for threads.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.unraisablehook
        owned = _left_to_the_system()
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
            if owned:
                _end_as_interrupted()
            raise SystemExit(130) from None
        except BrokenPipeError:
            # Python flushes stdout once more at its end, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        finally:
            if owned:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                sys.unraisablehook = before

    return wrapped


def _left_to_the_system() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def take_interrupts() -> None:
    """Makes Ctrl-C an exception where it was left to the system: from here on there is something to close.

    Comes after JAX was imported, which is no place for such an exception.
    """
    if not _left_to_the_system():
        return
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # Python drops what is raised within a callback of its garbage collector; JAX has one.
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(_MOMENT, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_as_interrupted() -> None:
    """Ends the process as the system does at Ctrl-C, so that a shell's loop around it ends too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os.kill(os.getpid(), signal.SIGINT)


def command_line(argv: Sequence[str] | None) -> list[str]:
    """The words of the command: `argv`, or those of the process.

    Raises:
      UserError: bytes in them are not UTF-8.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Python keeps such bytes as lone surrogates.
    bad = [os.fsencode(word) for word in words if not word.isascii() and _SURROGATE.search(word)]
    if bad:
        raise UserError(
            "\n  ".join(["the command line must be UTF-8; other bytes are in:", *(repr(word)[1:] for word in bad)])
        )
    return words


def report(mistakes: Sequence[str]) -> UserError:
    """One error for all `mistakes` of a stage, a line each, and no longer than a screen; a NotBuilt if one of them is
    `Unbuilt`."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    kind = NotBuilt if any(isinstance(mistake, Unbuilt) for mistake in mistakes) else UserError
    return kind("\n  ".join([f"{count} in the configuration:", *on_one_screen(mistakes)]))


def on_one_screen(lines: Sequence[str]) -> list[str]:
    """`lines`, or where they fill more than a screen, the first of each kind and how many more of it there are.

    Lines are of one kind if they say the same about different keys. A line that is too long by itself loses its middle.
    """
    clipped = [_clip(line) for line in lines]
    if _height(clipped) < SCREEN_LINES:
        return clipped
    kinds: dict[str, list[str]] = {}
    for line in clipped:
        kinds.setdefault(_kind(line), []).append(line)
    groups = list(kinds.values())
    # As many kinds as have room, then as many of each. No trial is shorter than the one before it.
    trials = itertools.chain(
        (_counted(groups[:count], groups[count:], 1) for count in range(1, len(groups) + 1)),
        (_counted(groups, [], each) for each in range(2, SCREEN_LINES)),
    )
    fitting = itertools.takewhile(lambda trial: _height(trial) < SCREEN_LINES, trials)
    return list(fitting)[-1]


def _counted(groups: Sequence[Sequence[str]], others: Sequence[Sequence[str]], each: int) -> list[str]:
    """At most `each` lines of each of `groups` and the number of its other lines; the number of lines of `others`."""
    shown: list[str] = []
    for lines in groups:
        shown += lines[:each]
        if left := len(lines[each:]):
            shown.append(f"and {left} more like {'these' if each > 1 else 'this'}")
    if others:
        shown.append(f"and {sum(map(len, others))} more of other kinds")
    return shown


def _height(lines: Iterable[str]) -> int:
    return sum(-(-(len(line) + 2) // SCREEN_COLUMNS) for line in lines)


def _clip(line: str) -> str:
    """`line` in at most eight rows of a screen; its end may name the nearest choice, so that it loses its middle."""
    most = 8 * SCREEN_COLUMNS - 2
    return line if len(line) <= most else f"{line[: most - 205]} ... {line[-200:]}"


def _kind(line: str) -> str:
    """The first words of what `line` says, without the key, its value, where it stands and other names and numbers."""
    head, _, said = line.partition("): ")
    name = head.partition("=")[0].partition(" ")[0]
    words = re.sub(r"'.*?'|\".*?\"|[0-9]+", "", (said or line).replace(name, "")).split()
    return " ".join(words[:4])


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of a message, `; nearest: NAME`, or nothing where no name resembles `word`.

    A name resembles it if most of the letters agree, or if it has all of the word's parts, as per_device_batch_size has
    those of batch_size.
    """
    candidates = list(names)
    parts = _parts(word)
    holding = [name for name in candidates if parts and parts <= _parts(name)]
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.7)
    if close and (len(parts) < 2 or not holding):
        return f"; nearest: {close[0]}"
    return f"; nearest: {min(holding, key=len)}" if holding else ""


def _parts(name: str) -> set[str]:
    return {part for part in re.split(r"[_\W]+", name) if len(part) > 2}


def shortened(text: str) -> str:
    """`text` on one line, for a message; its beginning where it is long."""
    line = " ".join(text[:400].split())
    return line if len(line) <= 80 and len(text) <= 400 else f"{line[:77]}..."

"""User errors, and how entry points report them."""

import contextlib
import difflib
import functools
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import ParamSpec, TypeVar

from trainer.config.words import counted, visible

P = ParamSpec("P")
R = TypeVar("R")

SURROGATE = re.compile("[\ud800-\udfff]")
_INTERRUPTED = 130  # the exit code after Ctrl-C: 128 + 2
# The maximum size of a message.
SCREEN_LINES, SCREEN_COLUMNS = 40, 160


class UserError(ValueError):
    """An error caused by the user. The message states what is wrong, where, and the nearest valid choice."""


class NotBuilt(UserError, NotImplementedError):
    """An error about a valid setting that is not implemented yet. The message may list other errors, too."""


class Unbuilt(str):
    """A message about a valid setting that is not implemented yet. If `report` gets such a message, it returns a
    NotBuilt."""


class RunStopped(RuntimeError):
    """Raised if a rule ends the run, for example at a NaN loss. The message states what to do."""


def exit_on_user_error(main: Callable[P, R]) -> Callable[P, R]:
    """Decorates an entry point. A UserError prints its message on stderr and exits with code 2, without a traceback.

    A RunStopped does the same with code 1. Following the shell's conventions, Ctrl-C exits with code 130 and a broken
    pipe (`| head`) with 141. Other exceptions pass through.

    If Ctrl-C has the system's default action when `main` begins (see `trainer/__init__.py`), this decorator does not
    change the action. `closed_at_interrupt` and `trainer.runtime.preemption` replace it while there is state to close
    or save. When `main` ends, the default action is restored, and an interrupted process ends without waiting for
    threads.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        default_action = _has_default_action()
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {visible(str(error))}", file=sys.stderr)
            raise SystemExit(2) from None
        except RunStopped as error:
            print(f"stopped: {visible(str(error))}", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            if default_action:
                _end_as_interrupted()
            raise SystemExit(_INTERRUPTED) from None
        except SystemExit as end:
            if default_action and end.code == _INTERRUPTED:  # the run has saved its state
                _end_as_interrupted()
            raise
        except BrokenPipeError:
            # Python flushes stdout again at exit; that flush must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        finally:
            if default_action:
                signal.signal(signal.SIGINT, signal.SIG_DFL)

    return wrapped


def _has_default_action() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@contextlib.contextmanager
def closed_at_interrupt(close: Callable[[], object]) -> Iterator[None]:
    """Calls `close` when the context ends, and at Ctrl-C if Ctrl-C has the system's default action.

    In the second case, Ctrl-C ends the process without raising an exception, because an exception could be lost: Python
    drops exceptions in callbacks of its garbage collector, and JAX has such a callback.
    """

    def end(number: int, frame: FrameType | None) -> None:
        close()
        print("interrupted", file=sys.stderr)
        _end_as_interrupted()

    default_action = _has_default_action()
    if default_action:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        close()
        if default_action:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_as_interrupted() -> None:
    """Ends the process by SIGINT's default action, so that a surrounding loop in a shell ends, too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os.kill(os.getpid(), signal.SIGINT)


def command_line(argv: Sequence[str] | None) -> list[str]:
    """Returns `argv` or, if it is None, the arguments of the process.

    Prints a warning for each key that is given with two different values.

    Raises:
      UserError: the arguments are not UTF-8.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Python represents bytes that are not UTF-8 as lone surrogates.
    bad = [os.fsencode(word) for word in words if not word.isascii() and SURROGATE.search(word)]
    if bad:
        raise UserError(
            "\n  ".join(
                ["the command line must be UTF-8; these arguments are not:"]
                + on_one_screen([shortened(repr(word)[1:]) for word in bad])
            )
        )
    given: dict[str, tuple[str, str]] = {}  # key without its group (lora_rank for lora.lora_rank): argument, value
    for word in words:
        name, equals, text = word.partition("=")
        key = name if "_overrides." in name else name.rpartition(".")[2]  # teacher_overrides.KEY does not set KEY
        before, said = given.get(key, (word, text))
        if equals and said != text:
            line = f"warning: {shortened(before)} has no effect: a later argument overrides it, {shortened(word)}"
            print(line, file=sys.stderr)
        given[key] = word, text
    return words


def report(mistakes: Sequence[str]) -> UserError:
    """Returns one error that lists all `mistakes` on at most one screen; a NotBuilt if one of them is an `Unbuilt`."""
    kind = NotBuilt if any(isinstance(mistake, Unbuilt) for mistake in mistakes) else UserError
    return kind("\n  ".join([f"{counted(len(mistakes), 'mistake')} in the configuration:", *on_one_screen(mistakes)]))


def on_one_screen(lines: Sequence[str]) -> list[str]:
    """Returns `lines` if they fit on a screen; otherwise those that fit, in order, and a last line with the number of
    omitted lines.

    If not all lines fit, the first line of each kind takes precedence over other lines; lines of the same kind state
    the same problem for different keys. Very long lines are cut in the middle.
    """
    clipped = [_clip(line) for line in lines]
    if _height(clipped) < SCREEN_LINES:
        return clipped
    kinds = [_kind(line) for line in clipped]
    order = sorted(range(len(clipped)), key=lambda i: (kinds.index(kinds[i]) < i, i))
    heights = itertools.accumulate(_height([clipped[i]]) for i in order)
    fitting = sorted(i for i, height in zip(order, heights, strict=True) if height < SCREEN_LINES - 1)
    return [*(clipped[i] for i in fitting), f"and {len(clipped) - len(fitting)} more"]


def _height(lines: Iterable[str]) -> int:
    return sum(-(-(len(line) + 2) // SCREEN_COLUMNS) for line in lines)


def _clip(line: str) -> str:
    """Returns `line`, cut to eight rows of a screen. Cuts in the middle, as the end may name the nearest choice."""
    most = 8 * SCREEN_COLUMNS - 2
    return line if len(line) <= most else f"{line[: most - 205]} ... {line[-200:]}"


def _kind(line: str) -> str:
    """Returns the kind of the message in `line`: its first words, without the key, its value and source, quoted names,
    and numbers."""
    head, _, said = line.partition("): ")
    name = head.partition("=")[0].partition(" ")[0]
    words = re.sub(r"'.*?'|\".*?\"|[0-9]+", "", (said or line).replace(name, "")).split()
    return " ".join(words[:4])


def nearest(word: str, names: Iterable[str]) -> str:
    """Returns the end of a message, `; nearest: NAME`, or "" if no name is similar to `word`.

    A name is similar if most letters match, or if it contains all parts of `word` that underscores separate:
    per_device_batch_size contains both parts of batch_size. For num_steps the nearest name is steps, although a longer
    name contains both num and steps.
    """
    candidates = list(names)
    parts = _parts(word)
    holding = [name for name in candidates if parts and parts <= _parts(name)]
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.7)
    if close and (len(parts) < 2 or not holding or _parts(close[0]) <= parts):
        return f"; nearest: {close[0]}"
    # A short name such as num_layers probably means a size of the model, not a part of another key.
    return f"; nearest: {min(holding, key=lambda name: (not name.startswith('base_'), len(name)))}" if holding else ""


def _parts(name: str) -> set[str]:
    return {part for part in re.split(r"[_\W]+", name) if len(part) > 2}


def shortened(text: str) -> str:
    """Returns `text` on one line, for a message. Truncates long text."""
    line = " ".join(text[:400].split())
    return line if len(line) <= 80 and len(text) <= 400 else f"{line[:77]}..."

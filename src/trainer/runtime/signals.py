"""Temporary signal handlers, and processes that die with their parent."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1  # an option of Linux's prctl


@contextlib.contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """A context in which `handler(number, frame)` handles the signals `numbers`. Only the main thread may enter it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def die_with(parent: int) -> None:
    """Makes this process die with its parent process, whose id is `parent`.

    On systems other than Linux, a thread checks once a second whether the parent has died, so this process dies later,
    and does not die while other code blocks Python's threads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent has already died
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)

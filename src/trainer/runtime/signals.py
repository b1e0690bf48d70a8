"""Signal handlers for the time of a context."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """A context in which `handler(number, frame)` handles signals. Only the main thread may enter it."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

"""Loads batches ahead of the loop that consumes them."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, Self, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Closable(Protocol[T_co]):
    """An iterator that must be closed when it is no longer needed, like a generator."""

    def __next__(self) -> T_co: ...

    def close(self) -> object: ...


class Loader(Generic[T], Iterator[T]):
    """Iterates over the first `count` items of an iterator (None: all), and loads `depth` of them ahead.

    One background thread calls the iterator, in order. If the iterator raises an exception, the call of `next` for that
    item raises the same exception, with its traceback. Items are returned unchanged. So if an item contains the
    position from which to resume, this position is correct, although the thread has already read later items. Close the
    loader, or use it as a context manager, to end the thread and close the iterator.

    Attributes:
      waited: total seconds that calls of `next` have waited so far.
    """

    def __init__(self, items: Closable[T], count: int | None = None, *, depth: int = 2):
        self._items, self._left, self._depth = items, count, depth
        self._ahead: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._open = True
        self.waited = 0.0
        self._fill()

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        first = self._ahead.popleft()
        self._fill()
        started = time.perf_counter()
        try:
            return first.result()
        finally:
            self.waited += time.perf_counter() - started

    def close(self) -> None:
        """Ends the iteration, waits until the thread has finished its current item and ended, and closes the
        iterator."""
        if self._open:
            self._open = False
            self._ahead.clear()
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self) -> None:
        while self._open and len(self._ahead) < self._depth and self._left != 0:
            self._ahead.append(self._thread.submit(self._items.__next__))
            self._left = None if self._left is None else self._left - 1

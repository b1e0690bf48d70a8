"""Loads batches ahead of the loop that consumes them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Loader(Generic[T], Iterator[T]):
    """Iterates over load(start), load(start + 1), ..., up to but without load(stop), and `depth` of them ahead.

    One background thread calls `load`, in order. What it raises is raised, traceback included, by the `next` that asks
    for that step. Close it, or use it as a context manager, so that the thread ends.
    """

    def __init__(self, load: Callable[[int], T], start: int = 0, stop: int | None = None, *, depth: int = 2):
        self._load, self._next, self._stop, self._depth = load, start, stop, depth
        self._ahead: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._open = True
        self._fill()

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        first = self._ahead.popleft()
        self._fill()
        return first.result()

    def close(self) -> None:
        """Ends the thread, once the step it is loading is done, and the iteration."""
        self._open = False
        self._ahead.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while self._open and len(self._ahead) < self._depth and (self._stop is None or self._next < self._stop):
            self._ahead.append(self._thread.submit(self._load, self._next))
            self._next += 1

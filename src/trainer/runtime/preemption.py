"""SIGTERM as a request that is met between two steps."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 143  # what a shell reports of a process that SIGTERM ended: 128 + 15


class Preemption:
    """A context in which SIGTERM only sets `requested`. Outside of it the signal ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._before: Any = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

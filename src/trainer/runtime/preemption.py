"""SIGTERM as a request that is met between two steps, by all processes between the same two."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 143  # what a shell reports of a process that SIGTERM ended: 128 + 15


class Preemption:
    """A context in which SIGTERM only makes a request. Outside of it the signal ends a process by itself at once.

    Of several processes each keeps the signal from `jax.distributed.initialize` on, by a handler of JAX's, and a signal
    to one of them is a request to all.

    Attributes:
      requested: the run shall end. Of several processes, what `check` said last.
    """

    def __init__(self) -> None:
        import jax

        self.requested = False
        self._alone = jax.process_count() == 1
        self._checks = 0

    def check(self) -> bool:
        """Whether to end. Every process asks at the same places, and all are told at the same one; cheap."""
        if not self._alone and not self.requested:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self._checks += 1
            self.requested = reached_preemption_sync_point(self._checks)
            if self.requested:
                # A second one shall not end the process within the save that the first one asked for.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self.requested

    def __enter__(self) -> Self:
        if self._alone:
            self._before: Any = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

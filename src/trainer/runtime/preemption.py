"""SIGTERM as a request that is met between two steps, by all processes between the same two."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 143  # what a shell reports of a process that SIGTERM ended: 128 + 15


class Preemption:
    """A context in which SIGTERM only makes a request. Outside of it the signal ends a process by itself at once.

    Of several processes each keeps the signal from `jax.distributed.initialize` on, by a handler of JAX's, and a signal
    to one of them is a request to all.

    Attributes:
      requested: the run shall end. Of several processes, what `check` said last; for one by itself it is up to date.
    """

    def __init__(self) -> None:
        import jax

        self.requested = False
        self._alone = jax.process_count() == 1

    def check(self, updates: int) -> bool:
        """Whether to end before the next update. Every process asks after each, and all are told the same; cheap.

        JAX agrees on the largest number that a process has asked with, and one more. Orbax asks too when it saves, with
        its own number, which is `updates`: so the next number to ask with is always one more, whoever asked last.
        """
        if not self._alone and not self.requested:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.requested = reached_preemption_sync_point(updates + 1)
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


@contextlib.contextmanager
def ends_at_sigterm(text: str) -> Iterator[None]:
    """A context in which SIGTERM prints `text` and ends the process at once, with `EXIT_CODE`.

    For compilations, which may take minutes: a handler in Python, and any exception, would wait for their end. So a
    thread is told of the signal by the system, and ends the process itself. Of several processes JAX keeps the signal.
    """
    import jax

    if jax.process_count() > 1:
        yield
        return
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    fd_before = signal.set_wakeup_fd(sent)
    thread = threading.Thread(target=_end_when_told, args=(received, text), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        signal.signal(signal.SIGTERM, before)
        os.close(sent)
        thread.join()
        os.close(received)


def _end_when_told(received: int, text: str) -> None:
    while number := os.read(received, 1):
        if number[0] == signal.SIGTERM:
            print(text, flush=True)
            sys.stderr.flush()
            os._exit(EXIT_CODE)

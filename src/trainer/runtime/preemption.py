"""Handles SIGTERM as a request to end after the current step, the same step in all processes; and handles Ctrl-C."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 143  # the shell's exit code for a process that SIGTERM ended: 128 + 15


class Preemption:
    """A context in which SIGTERM only requests the end of the run. Outside, SIGTERM ends a single process immediately.

    Inside, Ctrl-C raises KeyboardInterrupt. Outside, with the system's default action, it ends the process immediately.

    With several processes, JAX handles SIGTERM after `jax.distributed.initialize`, and a signal to one process is a
    request to all processes.

    Attributes:
      requested: whether the run should end. With several processes this is the last result of `check`; with a single
        process it is always current.
    """

    def __init__(self) -> None:
        import jax

        self.requested = False
        self._interrupted = False
        self._alone = jax.process_count() == 1

    def check(self, updates: int) -> bool:
        """Returns whether to end before the next update. Every process calls it after each update; all get the same
        answer.

        It is cheap. JAX synchronizes at one more than the largest number that any process has passed. Orbax also passes
        a number when it saves, which is `updates`, so `updates + 1` is always the next number.

        Raises:
          KeyboardInterrupt: after a Ctrl-C whose exception was lost. Python drops an exception in a callback of its
            garbage collector, and JAX has such a callback.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        if not self._alone and not self.requested:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.requested = reached_preemption_sync_point(updates + 1)
            if self.requested:
                # A second SIGTERM must not end the process during the save that the first one requested.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self.requested

    def __enter__(self) -> Self:
        if self._alone:
            self._before: Any = signal.signal(signal.SIGTERM, self._request)
        self._takes_sigint = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        if self._takes_sigint:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)
        if self._takes_sigint:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@contextlib.contextmanager
def ends_at_sigterm(text: str) -> Iterator[None]:
    """A context in which SIGTERM prints `text` and ends the process immediately, with `EXIT_CODE`.

    It is for compilations, which may take minutes. With some backends, a Python signal handler or an exception would
    wait for the end of the compilation. So the signal wakes a thread through a file descriptor, and the thread ends the
    process. With several processes, JAX handles the signal, and this context does nothing.
    """
    import jax

    if jax.process_count() > 1:
        yield
        return
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    fd_before = signal.set_wakeup_fd(sent)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    thread = threading.Thread(target=_exit_at_sigterm, args=(received, text), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(fd_before)
        os.close(sent)
        thread.join()
        os.close(received)


def _exit_at_sigterm(received: int, text: str) -> None:
    while number := os.read(received, 1):
        if number[0] == signal.SIGTERM:
            try:
                print(text, flush=True)
            finally:  # even if nobody reads the output any more
                os._exit(EXIT_CODE)

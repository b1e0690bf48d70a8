"""Handles SIGTERM and Ctrl-C as requests to end after the current step. All processes end after the same step."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from trainer.runtime.signals import handled

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


def exit_code(number: int) -> int:
    """Returns the exit code that a shell reports for a process that was ended by the signal `number`."""
    return 128 + number


class Preemption:
    """A context in which SIGTERM and the first Ctrl-C only request the end of the run.

    The second Ctrl-C ends the process immediately. If Ctrl-C does not have the system's default action at entry, the
    calling program handles Ctrl-C, and this context leaves that handling unchanged.

    With several processes, JAX handles SIGTERM after `jax.distributed.initialize`: a signal to one process is a request
    to all processes. Ctrl-C is converted to SIGTERM.

    Attributes:
      requested: whether the run should end. With several processes, it is the last result of `check`; with a single
        process, it changes as soon as a signal arrives.
      number: the first signal that requested the end; 0 if there was no signal.
    """

    def __init__(self, saves: bool = True) -> None:
        """`saves`: whether the run saves a checkpoint when it ends. The message that Ctrl-C prints depends on this."""
        import jax

        self.requested, self.number = False, 0
        self._alone, self._saves, self._next = jax.process_count() == 1, saves, 1

    def check(self, updates: int) -> bool:
        """Returns whether to end before the next update. Call it in all processes after each update.

        All processes get the same result. The call is cheap.

        JAX chooses a sync point: one more than the largest step number with which any process has called
        `reached_preemption_sync_point`. That function returns True only if its argument is the sync point. Orbax also
        calls it when it saves, with the number `updates`, so during training the sync point is `updates + 1`. The first
        `check` calls it with every number from 1 to `updates + 1`, because the sync point is 1 if a signal arrived
        while a resumed run started.
        """
        if not self._alone and not self.requested:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.requested = any(map(reached_preemption_sync_point, range(self._next, updates + 2)))
            self._next = updates + 2
            if self.requested:
                self.number = self.number or signal.SIGTERM
                # A second SIGTERM must not end the process during the save that the first SIGTERM requested.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self.requested

    def __enter__(self) -> Self:
        if self._alone:
            self._before: Any = signal.signal(signal.SIGTERM, self._request)
        self._takes_sigint = _is_the_systems(signal.SIGINT)
        if self._takes_sigint:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)
        if self._takes_sigint:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        how = "saves and ends" if self._saves else "ends without saving (enable_checkpointing=false)"
        with contextlib.suppress(OSError):  # not `print`, because the signal may have interrupted a `print`
            os.write(2, f"Ctrl-C: the run {how} after this update; Ctrl-C again ends it at once\n".encode())
        self.number = self.number or number
        if self._alone:
            self.requested = True
        else:
            signal.raise_signal(signal.SIGTERM)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.number = True, self.number or number


def _is_the_systems(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


@contextlib.contextmanager
def ends_at_signals(text: str) -> Iterator[None]:
    """A context in which SIGTERM and Ctrl-C print their name and `text` and end the process immediately.

    It is for compilations, which may take minutes. With some backends, a Python signal handler would run only after the
    compilation. So the signal wakes a thread through a file descriptor, and the thread ends the process. With several
    processes, JAX handles SIGTERM. As in `Preemption`, a calling program's Ctrl-C handling is unchanged.
    """
    import jax

    taken = [signal.SIGTERM] if jax.process_count() == 1 else []
    taken += [signal.SIGINT] if _is_the_systems(signal.SIGINT) else []
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    fd_before = signal.set_wakeup_fd(sent)
    thread = threading.Thread(target=_exit_at_signal, args=(received, taken, text), daemon=True)
    thread.start()
    try:
        with handled(taken, lambda number, frame: None):
            yield
    finally:
        signal.set_wakeup_fd(fd_before)
        os.close(sent)
        thread.join()
        os.close(received)


def _exit_at_signal(received: int, taken: list[signal.Signals], text: str) -> None:
    while number := os.read(received, 1):
        if number[0] in taken:
            try:
                print(f"{NAMES[signal.Signals(number[0])]}: {text}", flush=True)
            finally:  # even if the output is a closed pipe and `print` fails
                if number[0] == signal.SIGINT:  # SIGINT's default action also ends a shell loop
                    ctypes.CDLL(None).signal(signal.SIGINT, None)  # `signal.signal` works only in the main thread
                    os.kill(os.getpid(), signal.SIGINT)
                os._exit(exit_code(number[0]))

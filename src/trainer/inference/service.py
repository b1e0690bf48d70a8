"""A scheduler in a thread of its own, for an event loop or several threads."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trainer.inference.controls import Asked
from trainer.inference.scheduler import Event, Scheduler


class Service:
    """Runs `scheduler` in a thread. All methods may be called by any thread, and none waits for a step.

    Args:
      deliver: gets the events of each turn, in the thread of the scheduler.
      ended: is called in that thread when it ends, with the exception that ended it, or None after `stop`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        deliver: Callable[[list[Event]], object],
        ended: Callable[[BaseException | None], object],
    ):
        self._scheduler, self._deliver, self._ended = scheduler, deliver, ended
        self._changed, self._stopping = threading.Condition(), False
        self._cancelled: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Starts the thread, which first compiles what requests will need (`warm_up`), and delivers an empty list."""
        self._thread.start()

    def submit(self, tokens: Sequence[int], **how: Any) -> int:
        """See `Scheduler.submit`."""
        number = self._scheduler.submit(tokens, **how)
        self._wake()
        return number

    def cancel(self, number: int) -> None:
        """Ends a request before the next step, which delivers the event; nothing happens if it has ended already."""
        self._cancelled.append(number)
        self._wake()

    def stop(self) -> None:
        """Ends the thread after the present step, and waits for that."""
        self._stopping = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            if warm_up(self._scheduler, lambda: self._stopping):
                self._deliver([])
            while not self._stopping:
                self._turn()
        finally:
            self._ended(sys.exc_info()[1])

    def _turn(self) -> None:
        scheduler = self._scheduler
        with self._changed:
            while scheduler.idle and not (self._cancelled or self._stopping):
                self._changed.wait()
        events: list[Event] = []
        while self._cancelled:
            events += scheduler.cancel(self._cancelled.popleft())
        if events := events + scheduler.turn():
            self._deliver(events)


def warm_up(scheduler: Scheduler, stopping: Callable[[], bool] = lambda: False) -> bool:
    """Compiles the programs of an idle scheduler whose prompts go in chunks, by a request for each. Returns whether it
    has; not if `stopping` between two of them."""
    engine = scheduler.engine
    chunk, longest = min(engine.prefill_chunk_size, engine.max_prefill_length), engine.max_prefill_length
    sizes = sorted({min(size, chunk) for size in engine.rows.buckets})
    for first, size in enumerate(sizes):  # each begins with another token, so that they share no prefix
        scheduler.submit([first] * size, limit=2)
        # After a whole chunk, or after a cached prefix: the first token of the one before.
        before = 1 if engine.config.enable_prefix_caching else chunk
        if before + size <= longest:
            scheduler.submit([first] * before + [first + 1] * size, limit=2)
    if engine.served.controls:
        for length in {chunk, min(chunk + 1, longest)}:
            scheduler.submit([0] * length, limit=2, asked=Asked(log_probs=True, prompt_log_probs=True))
    while not scheduler.idle:
        if stopping():
            return False
        scheduler.turn()
    scheduler.forget_prefixes()
    return True

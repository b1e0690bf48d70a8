"""Runs a scheduler in a separate thread, for use from an event loop or from several threads."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trainer.inference.controls import NOTHING, Asked
from trainer.inference.engine import Engine
from trainer.inference.scheduler import Event, Scheduler


class Service:
    """Runs `scheduler` in a separate thread. Any thread may call any method. Only `stop` waits for a running step.

    Args:
      deliver: is called in the scheduler's thread with the events of each `Scheduler.turn`.
      ended: is called in the scheduler's thread when the thread ends, with the exception that ended the thread, or with
        None after `stop`.
      say: receives a line for each compiled program.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        deliver: Callable[[list[Event]], object],
        ended: Callable[[BaseException | None], object],
        say: Callable[[str], object] = lambda line: None,
    ):
        self._scheduler, self._deliver, self._ended, self._say = scheduler, deliver, ended, say
        self._changed, self._stopping = threading.Condition(), False
        self._cancelled: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Starts the thread, which first compiles the programs for requests (`warm_up`) and then delivers an empty
        list."""
        self._thread.start()

    def submit(self, tokens: Sequence[int], **how: Any) -> int:
        number = self._scheduler.submit(tokens, **how)
        self._wake()
        return number

    def cancel(self, number: int) -> None:
        """Ends a request before the next step, and delivers its last event. Does nothing if it has already ended."""
        self._cancelled.append(number)
        self._wake()

    def stop(self) -> None:
        """Ends the thread after the current step, and waits until it has ended."""
        self._stopping = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            if warm_up(self._scheduler, lambda: self._stopping, self._say):
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


def warm_up(
    scheduler: Scheduler,
    stopping: Callable[[], bool] = lambda: False,
    say: Callable[[str], object] = lambda line: None,
) -> bool:
    """Compiles the programs of an idle scheduler that uses chunked prefill, by running a request for each program.

    Returns True when all programs are compiled, or False as soon as `stopping()` is true. Reports each program and the
    time of its request to `say`.
    """
    needed = _needed(scheduler.engine)
    for number, (what, prompt, asked) in enumerate(needed, 1):
        began = time.perf_counter()
        scheduler.submit(prompt, limit=2, asked=asked)
        while not scheduler.idle:
            if stopping():
                return False
            scheduler.turn()
        say(f"compiled {number} of {len(needed)}: {what}, {time.perf_counter() - began:.1f} s")
    scheduler.forget_prefixes()
    return True


def _needed(engine: Engine) -> list[tuple[str, list[int], Asked]]:
    """Returns a triple for each program of `engine`: the program's purpose, and a prompt and options of a request that
    requires the program."""
    chunk, longest = min(engine.prefill_chunk_size, engine.max_prefill_length), engine.max_prefill_length
    sizes, needed = sorted({min(size, chunk) for size in engine.rows.buckets}), []
    for first, size in enumerate(sizes):  # prompts of different sizes begin with different tokens, so share no prefix
        needed.append((f"prompts of up to {size} tokens", [first] * size, NOTHING))
        # A prompt with `size` tokens after a complete chunk or, with prefix caching, after one token, which is cached
        # because the previous prompt begins with it.
        before = 1 if engine.config.enable_prefix_caching else chunk
        if before + size <= longest:
            prompt = [first] * before + [first + 1] * size
            needed.append((f"up to {size} tokens that continue a prompt", prompt, NOTHING))
    needed[0] = (f"decode steps, and {needed[0][0]}", *needed[0][1:])
    if engine.served.controls:
        scored = Asked(log_probs=True, prompt_log_probs=True)
        for length in sorted({chunk, min(chunk + 1, longest)}):
            needed.append((f"log-probabilities of a prompt of {length} tokens", [0] * length, scored))
    return needed

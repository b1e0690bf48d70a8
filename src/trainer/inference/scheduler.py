"""Runs many requests on the slots of an engine: a queue, prefill between decode steps, and early ends."""

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.inference.engine import Engine
from trainer.inference.prefixes import PrefixCache
from trainer.inference.sampling import Sampling, check_drawing
from trainer.inference.state import Prefix, Result

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


class Event(NamedTuple):
    """An event of a request: a new token, its end, or both.

    Attributes:
      request: the number of the request.
      token: None if there is none: at a stop token and after `cancel`.
      log_prob: of the token; None with return_log_prob=false.
      end: None while the request continues; STOP (a stop token was drawn), LENGTH (its limit, or max_target_length) or
        CANCELLED.
    """

    request: int
    token: int | None
    log_prob: float | None = None
    end: str | None = None


@dataclass
class _Request:
    number: int
    tokens: np.ndarray
    limit: int  # the maximum number of tokens to generate
    stop: Collection[int]
    sampling: Sampling | None
    seed: int | None
    adapter: int = 0
    done: int = 0  # the number of tokens of the prompt that are prefilled
    prefix: Prefix | None = None
    generated: int = 0
    ended: bool = False


@dataclass
class _Step:
    """A result that has not been read yet, with the requests whose tokens it holds, by index."""

    result: Result
    owners: dict[int, _Request] = field(default_factory=dict)


class Scheduler:
    """Runs requests on the slots of `engine`.

    Each turn prefills one prompt, or one chunk of it with use_chunked_prefill, if a slot is free. Then it runs a decode
    step. So a running request never waits for more than one chunk. The results of a decode step are read after the next
    step was started, so that the devices do not wait.
    """

    def __init__(self, engine: Engine, params: Any):
        self.engine, self.params = engine, params
        config = engine.config
        self._state = engine.init_decode_state()
        self._numbers = itertools.count()
        self._queue: deque[_Request] = deque()
        self._prefilling: _Request | None = None
        self._slots: dict[int, _Request] = {}
        self._free = deque(range(engine.max_concurrent_decodes))
        self._unread: list[_Step] = []
        limit = config.prefix_caching_hbm_byte
        self._prefixes = PrefixCache(limit, engine.places) if config.enable_prefix_caching else None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queue or self._prefilling or self._slots or self._unread)

    @property
    def free_slots(self) -> int:
        """The number of slots without a request."""
        return len(self._free)

    def submit(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None = None,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
        seed: int | None = None,
        adapter: int = 0,
    ) -> int:
        """Adds a request to the queue and returns its number.

        Args:
          tokens: the prompt.
          limit: the maximum number of tokens to generate. Prompt and generated tokens together never exceed
            max_target_length.
          stop: tokens that end the sequence and do not belong to it.
          sampling, seed, adapter: see `Engine.prefill`.

        Raises:
          ValueError: the prompt is empty or too long, the limit is not positive, or there is no such adapter.
          UserError: a token is not in the vocabulary, or a value of `sampling` or `seed` is not allowed.
        """
        self.engine.padded(tokens)
        self.engine.numbered([adapter])
        check_drawing(sampling or Sampling(), () if seed is None else (seed,))
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: at least one token is generated")
        room = self.engine.config.max_target_length - len(tokens)
        limit = room if limit is None else min(limit, room)
        row = np.asarray(tokens, np.int32)
        request = _Request(next(self._numbers), row, limit, frozenset(stop), sampling, seed, adapter)
        self._queue.append(request)
        return request.number

    def cancel(self, number: int) -> list[Event]:
        """Ends a request in any state, and returns the events; [] if it has ended already."""
        waiting = next((queued for queued in self._queue if queued.number == number), None)
        if waiting is not None:
            self._queue.remove(waiting)
            return [Event(number, None, end=CANCELLED)]
        if self._prefilling is not None and self._prefilling.number == number:
            self._prefilling = None
            return [Event(number, None, end=CANCELLED)]
        for slot, request in self._slots.items():
            if request.number == number:
                self._end(slot)
                return [Event(number, None, end=CANCELLED)]
        return []

    def turn(self) -> list[Event]:
        """Runs one chunk of prefill and one decode step, if there is work. Returns the events in order."""
        unread, self._unread = self._unread, []
        if self._free and (self._prefilling or self._queue):
            self._prefill()
        if self._slots:
            self._state, result = self.engine.generate(self.params, self._state)
            self._unread.append(_Step(result, dict(self._slots)))
        return [event for step in unread for event in self._read(step)]

    def run(self) -> Iterator[Event]:
        """Runs turns until nothing is left to do. Yields the events."""
        while not self.idle:
            yield from self.turn()

    def _prefill(self) -> None:
        """Prefills the next part of a prompt; with its last part, the request gets a slot."""
        request = self._prefilling or self._begin(self._queue.popleft())
        engine, left = self.engine, request.tokens[request.done :]
        chunked = engine.use_chunked_prefill
        part = left[: engine.prefill_chunk_size] if chunked else left
        request.prefix, result = engine.prefill(
            self.params,
            np.pad(part, (0, engine.prefill_chunk_size - part.size)) if chunked else engine.padded(part),
            part.size,
            existing_prefix=request.prefix,
            sampling=request.sampling,
            seed=request.seed,
            adapter=request.adapter,
        )
        request.done += part.size
        if request.done < request.tokens.size:
            self._prefilling = request
            return
        self._prefilling = None
        if self._prefixes is not None:
            self._prefixes.put(request.tokens, request.prefix, request.adapter)
        slot = self._free.popleft()
        self._state = engine.insert(request.prefix, self._state, slot)
        request.prefix = None
        self._slots[slot] = request
        self._unread.append(_Step(result, {0: request}))

    def _begin(self, request: _Request) -> _Request:
        """Returns `request` with the longest cached prefix of its prompt."""
        if self._prefixes is not None:
            request.prefix, request.done = self._prefixes.get(request.tokens, request.adapter)
        return request

    def _read(self, step: _Step) -> Iterator[Event]:
        tokens, log_probs = jax.device_get((step.result.tokens, step.result.log_probs))
        for i, request in step.owners.items():
            if request.ended:
                continue  # in the step before
            token = int(tokens[i])
            log_prob = None if log_probs is None else float(log_probs[i])
            request.generated += 1
            if token in request.stop:
                event = Event(request.number, None, log_prob, STOP)
            else:
                event = Event(request.number, token, log_prob, LENGTH if request.generated == request.limit else None)
            if event.end is not None:
                self._end(next(slot for slot, owner in self._slots.items() if owner is request))
            yield event

    def _end(self, slot: int) -> None:
        self._slots.pop(slot).ended = True
        self._state = self.engine.release(self._state, slot)
        self._free.append(slot)

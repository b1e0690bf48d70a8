"""Runs queued requests on the slots of an engine, with prefills between the decode steps."""

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.inference.controls import NOTHING, Asked, Scores, check_asked
from trainer.inference.engine import Engine
from trainer.inference.prefixes import PrefixCache
from trainer.inference.sampling import Sampling, check_drawing
from trainer.inference.state import Prefix, Result

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


class Event(NamedTuple):
    """An event of a request: a new token, the end of the request, or both.

    Attributes:
      request: the number of the request.
      token: the new token; None if a stop token was drawn or the request was cancelled.
      log_prob: the log-probability of the new token or the stop token. For an engine with `Served.controls`, None
        unless the request asks for log-probabilities; for any other engine, None with return_log_prob=false.
      end: None while the request continues; STOP (a stop token was drawn), LENGTH (the request's limit, or
        max_target_length, was reached) or CANCELLED.
      stopped: the stop token that was drawn; None if none was.
      likeliest: if requested, the most likely tokens at the token's position, with their log-probabilities.
      prompt: if requested, the scores of all prompt tokens but the first. Only the request's first event has them.
    """

    request: int
    token: int | None
    log_prob: float | None = None
    end: str | None = None
    stopped: int | None = None
    likeliest: Sequence[tuple[int, float]] | None = None
    prompt: Scores | None = None


@dataclass
class _Request:
    number: int
    limit: int  # the maximum number of tokens to generate
    stop: Collection[int]
    scored: bool = False
    generated: int = 0
    ended: bool = False


@dataclass(eq=False)  # `==` of arrays is not a bool
class _Prompt:
    """A prompt and the requests that continue it."""

    tokens: np.ndarray
    requests: list[_Request]
    sampling: Sampling | None
    seed: int | None
    adapter: int = 0
    sample: int = 0
    asked: Asked = NOTHING
    owner: str = ""
    done: int = 0  # the number of prompt tokens in `prefix`
    prefix: Prefix | None = None
    scores: list[tuple[int, Scores]] = field(default_factory=list)  # for each chunk: its number of tokens, its scores


@dataclass
class _Step:
    """A result that has not been read yet, and its requests, by the index of their token in the result."""

    result: Result
    owners: dict[int, _Request] = field(default_factory=dict)
    prompt: _Prompt | None = None  # the prompt whose scores are read at the same time


class Scheduler:
    """Runs requests on the slots of `engine`.

    Each call of `turn` prefills one prompt (with use_chunked_prefill, one chunk of a prompt) if slots are free for the
    prompt's requests, and then runs a decode step. So a running request waits for at most one prefill between two
    decode steps.
    The results of a decode step are read after the next step has started, so that devices do not wait for the host.

    If no request is running, `turn` runs no decode step after the prefill, and reads the prefill's token immediately.
    Thus the first token does not wait for the compilation of decode steps.

    Any thread may call `submit`. Only one thread at a time may call other methods (see `inference.service.Service`).

    Attributes:
      prefilled: the number of prompt tokens that were prefilled.
      reused: the number of prompt tokens that were taken from cached prefixes instead.
    """

    def __init__(self, engine: Engine, params: Any, *, fill: bool = False):
        """`fill`: whether `turn` prefills prompts for all free slots, which increases the throughput, but delays
        running requests."""
        self.engine, self.params, self._fill = engine, params, fill
        self._state = engine.init_decode_state()
        self._numbers = itertools.count()
        self._queue: deque[_Prompt] = deque()
        self._prefilling: _Prompt | None = None
        self._slots: dict[int, _Request] = {}
        self._free = deque(range(engine.max_concurrent_decodes))
        self._unread: list[_Step] = []
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, and resets `prefilled` and `reused`."""
        config = self.engine.config
        limit, self.prefilled, self.reused = config.prefix_caching_hbm_byte, 0, 0
        self._prefixes = PrefixCache(limit, self.engine.places) if config.enable_prefix_caching else None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queue or self._prefilling or self._slots or self._unread)

    @property
    def free_slots(self) -> int:
        """The number of slots without a request."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """The number of prompts that wait for slots."""
        return len(self._queue) + (self._prefilling is not None)

    def submit(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None = None,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
        seed: int | None = None,
        adapter: int = 0,
        samples: int = 1,
        sample: int = 0,
        asked: Asked = NOTHING,
        owner: str = "",
    ) -> int:
        """Adds `samples` requests, which have consecutive numbers, to the queue. Returns the first number.

        Args:
          tokens: the prompt.
          limit: the maximum number of tokens to generate. The prompt and the generated tokens together never exceed
            max_target_length.
          stop: tokens that end the sequence and are not part of it.
          sampling, seed, adapter: see `Engine.prefill`.
          samples: the number of sequences that continue the prompt, which is prefilled once.
          sample: see `Engine.prefill`.
          asked: the request's options, for an engine with `Served.controls`.
          owner: the owner of the requests, which use only cached prefixes of the same owner.

        Raises:
          ValueError: the prompt is empty or too long, the limit is not positive, the adapter does not exist, `samples`
            is not between 1 and the number of slots, or `asked` requires `Served.controls`.
          UserError: a token is not in the vocabulary, or a value of `sampling`, `seed` or `asked` is not allowed.
        """
        self.engine.padded(tokens)
        self.engine.numbered([adapter])
        check_drawing(sampling or Sampling(), () if seed is None else (seed,))
        check_asked(asked, self.engine.config.vocab_size)
        if asked != NOTHING and not self.engine.served.controls:
            raise ValueError("the engine was made without controls, so requests cannot ask for any")
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: must be at least 1")
        if not 1 <= samples <= self.engine.max_concurrent_decodes:
            raise ValueError(f"samples={samples}: the engine has {self.engine.max_concurrent_decodes} slots")
        room = self.engine.config.max_target_length - len(tokens)
        limit = room if limit is None else min(limit, room)
        scored, stops = asked.log_probs, frozenset(stop)
        requests = [_Request(next(self._numbers), limit, stops, scored) for _ in range(samples)]
        ids = np.asarray(tokens, np.int32)
        self._queue.append(_Prompt(ids, requests, sampling, seed, adapter, sample, asked, owner))
        return requests[0].number

    def cancel(self, number: int) -> list[Event]:
        """Ends a waiting or running request. Returns a list with its last event; [] if it has already ended."""
        for prompt in (*self._queue, *([self._prefilling] if self._prefilling else ())):
            for request in prompt.requests:
                if request.number == number and not request.ended:
                    request.ended = True
                    if all(other.ended for other in prompt.requests):
                        self._drop(prompt)
                    return [Event(number, None, end=CANCELLED)]
        for slot, request in self._slots.items():
            if request.number == number:
                self._end(slot)
                return [Event(number, None, end=CANCELLED)]
        return []

    def _drop(self, prompt: _Prompt) -> None:
        if prompt is self._prefilling:
            self._prefilling = None
        else:
            self._queue.remove(prompt)

    def turn(self) -> list[Event]:
        """Runs a prefill (with `fill`, several) and a decode step; see the class's docstring. Returns the events in
        order."""
        unread, self._unread = self._unread, []
        first = not (self._slots or self._fill)
        while self._can_prefill():
            self._prefill()
            if not self._fill:
                break
        if first:
            unread, self._unread = unread + self._unread, []
        elif self._slots:
            self._state, result = self.engine.generate(self.params, self._state)
            self._unread.append(_Step(result, dict(self._slots)))
        return [event for step in unread for event in self._read(step)]

    def run(self) -> Iterator[Event]:
        """Calls `turn` until nothing is left to do. Yields the events."""
        while not self.idle:
            yield from self.turn()

    def _can_prefill(self) -> bool:
        waiting = self._prefilling or (self._queue[0] if self._queue else None)
        return waiting is not None and len(waiting.requests) <= len(self._free)

    def _prefill(self) -> None:
        """Prefills the next part of a prompt. After the last part, each request of the prompt gets a slot."""
        prompt = self._prefilling or self._begin(self._queue.popleft())
        engine, left = self.engine, prompt.tokens[prompt.done :]
        chunked = engine.use_chunked_prefill
        part = left[: engine.prefill_chunk_size] if chunked else left
        scored = prompt.asked.prompt_log_probs
        # Chunks of scored prompts are padded to full size; otherwise scoring would need one more program per length.
        padded = engine.part(part, whole=scored) if chunked else engine.padded(part)
        targets = np.zeros_like(padded) if scored else None
        if targets is not None:
            following = left[1 : 1 + part.size]
            targets[: following.size] = following
        prompt.prefix, result = engine.prefill(
            self.params,
            padded,
            part.size,
            existing_prefix=prompt.prefix,
            num_samples=len(prompt.requests),
            sampling=prompt.sampling,
            seed=prompt.seed,
            adapter=prompt.adapter,
            sample=prompt.sample,
            controls=engine.controls(prompt.asked, prompt.tokens),
            targets=targets,
        )
        prompt.done += part.size
        self.prefilled += part.size
        if result.prompt is not None:
            prompt.scores.append((part.size, result.prompt))
        if prompt.done < prompt.tokens.size:
            self._prefilling = prompt
            return
        self._prefilling = None
        if self._prefixes is not None:
            self._prefixes.put(prompt.tokens, prompt.prefix, (prompt.adapter, prompt.owner))
        slots = [self._free.popleft() for _ in prompt.requests]
        self._state = engine.bulk_insert(prompt.prefix, self._state, slots)
        self._slots |= dict(zip(slots, prompt.requests, strict=True))
        self._unread.append(_Step(result, dict(enumerate(prompt.requests)), prompt if prompt.scores else None))
        prompt.prefix = None
        for slot, request in zip(slots, prompt.requests, strict=True):
            if request.ended:  # cancelled while its prompt waited
                self._end(slot)

    def _begin(self, prompt: _Prompt) -> _Prompt:
        """Returns `prompt` with its longest cached prefix, if there is one."""
        if self._prefixes is not None and not prompt.asked.prompt_log_probs:
            prompt.prefix, prompt.done = self._prefixes.get(prompt.tokens, (prompt.adapter, prompt.owner))
            self.reused += prompt.done
        return prompt

    def _read(self, step: _Step) -> Iterator[Event]:
        result = step.result
        scores = result.scores if any(request.scored for request in step.owners.values()) else None
        if result.scores is not None:
            result = result._replace(log_probs=None if scores is None else scores.log_probs)
        tokens, log_probs, scores = jax.device_get((result.tokens, result.log_probs, scores))
        of_prompt = self._read_prompt(step.prompt) if step.prompt else None
        for i, request in step.owners.items():
            if request.ended:
                continue  # the request has ended, so this token is dropped
            token = int(tokens[i])
            log_prob = None if log_probs is None else float(log_probs[i])
            likeliest = None
            if scores is not None:
                log_prob = log_prob if request.scored else None
                likeliest = list(zip(scores.tokens[i].tolist(), scores.top[i].tolist(), strict=True))
            request.generated += 1
            if token in request.stop:
                event = Event(request.number, None, log_prob, STOP, token)
            else:
                event = Event(request.number, token, log_prob, LENGTH if request.generated == request.limit else None)
            if scores is not None or of_prompt is not None:
                event = event._replace(likeliest=likeliest if request.scored else None, prompt=of_prompt)
            if event.end is not None:
                self._end(next(slot for slot, owner in self._slots.items() if owner is request))
            yield event

    @staticmethod
    def _read_prompt(prompt: _Prompt) -> Scores:
        """Returns the scores of all tokens of a prompt but the first, as NumPy arrays."""
        read = [[x[:size] for x in jax.device_get(one)] for size, one in prompt.scores]
        whole = Scores(*map(np.concatenate, zip(*read, strict=True)))
        return Scores(*(each[:-1] for each in whole))

    def _end(self, slot: int) -> None:
        self._slots.pop(slot).ended = True
        self._state = self.engine.release(self._state, slot)
        self._free.append(slot)

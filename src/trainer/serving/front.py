"""Connects the event loop with the scheduler's thread: submits requests and returns parts of generated texts."""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.chat.encoder import Prompts
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.data.tokenizer import Tokenizer
from trainer.inference.controls import Scores
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Event, Scheduler
from trainer.inference.service import Service
from trainer.serving.errors import ApiError, unavailable
from trainer.serving.metrics import Metrics
from trainer.serving.queries import Query, as_api_error
from trainer.serving.reading import HUGE, LARGE, OneAside, Read, Reader
from trainer.serving.texts import Names, Text, Token

STARTING, READY, DRAINING, FAILED = "starting", "ready", "draining", "failed"


class Model(NamedTuple):
    """The served model.

    Attributes:
      adapters: maps the names that requests use for the base and its adapters to numbers: 0 for the base, and 1, 2, ...
        for the adapters.
      begin, stop: the tokens before a prompt, and the tokens that end a text.
      turn_end: further tokens that end a response in a chat.
      default: the sampling parameters that apply if a request does not set them.
      seed: the seed of requests that do not set a seed; None: each of these requests gets a random seed.
    """

    scheduler: Scheduler
    tokenizer: Tokenizer
    chat: Prompts
    adapters: Mapping[str, int]
    begin: Sequence[int]
    stop: Sequence[int]
    turn_end: Sequence[int]
    default: Sampling
    seed: int | None

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.scheduler.engine.config


class Delta(NamedTuple):
    """A new part of a choice.

    Attributes:
      choice: the index of the choice.
      text, tokens: the text and the tokens of this part.
      end: why the choice ended; None while it continues.
      prompt: in the first part, the scores of the prompt's tokens, if they were requested.
    """

    choice: int
    text: str
    tokens: list[Token]
    end: str | None
    prompt: Scores | None


class Generation:
    """The choices of a request: `query.n` choices for each prompt, in the order of the prompts."""

    def __init__(self, front: "Front", query: Query, prompts: list[list[int]], received: float):
        self.query, self.prompts, self.received = query, prompts, received
        self.texts = [Text(front.model.tokenizer, row, query.stop) for row in prompts for _ in range(query.n)]
        self._front, self._numbers = front, list[int]()
        self._parts: asyncio.Queue[Delta | ApiError] = asyncio.Queue()
        self._left = len(self.texts)

    def prompt_of(self, choice: int) -> list[int]:
        """Returns the prompt tokens of a choice."""
        return self.prompts[choice // self.query.n]

    def begin(self, numbers: list[int]) -> None:
        """Stores the number that the scheduler gave each choice."""
        self._numbers = numbers

    def take(self, choice: int, event: Event) -> bool:
        """Adds an event of a choice. Returns whether a stop string has ended the choice."""
        text = self.texts[choice]
        part, tokens = text.add(event)
        end = "stop" if text.stopped else event.end
        if part or tokens or end or event.prompt is not None:
            self._parts.put_nowait(Delta(choice, part, tokens, end, event.prompt))
        return text.stopped

    async def parts(self) -> AsyncIterator[Delta]:
        """Yields parts until all choices have ended. Raises ApiError if the server ends the request."""
        while self._left:
            part = await self._parts.get()
            if isinstance(part, ApiError):
                raise part
            self._left -= part.end is not None
            yield part

    def fail(self, error: ApiError) -> None:
        """Ends the generation with an error."""
        self._parts.put_nowait(error)

    def close(self) -> None:
        """Cancels the choices that are still running."""
        self._front.release(self, self._numbers)


@dataclass
class _Running:
    generation: Generation
    choice: int
    last: float = 0.0  # the time of the choice's last token; 0 before the first


class Front:
    """Accepts requests for `model`, in one event loop.

    Attributes:
      state: STARTING until the programs are compiled, then READY; at the end, DRAINING or FAILED. Requests are
        accepted only in READY.
    """

    def __init__(self, model: Model, metrics: Metrics, failed: Callable[[], None], say: Callable[[str], object]):
        """`failed`: called if the scheduler's thread fails. `say`: see `inference.service.Service`."""
        self.model, self.metrics, self.names = model, metrics, Names(model.tokenizer)
        self.state, self.created = STARTING, int(time.time())
        self.ready = asyncio.Event()
        self._failed, self._loop = failed, asyncio.get_running_loop()
        self._running: dict[int, _Running] = {}
        self._generations: set[Generation] = set()
        self._seconds = 1.0  # the mean duration of requests, for Retry-After
        self._pool = ThreadPoolExecutor(2, "requests")
        longest, room = model.scheduler.engine.max_prefill_length, model.config.max_target_length
        self._reader = Reader(model.tokenizer, model.chat, model.begin, model.default, longest, room, model.adapters)
        self._large, self._huge = (
            OneAside(self._reader, model.config.receive_seconds, self.check_ready) for _ in range(2)
        )
        in_loop = self._loop.call_soon_threadsafe
        self.service = Service(
            model.scheduler,
            lambda events: in_loop(self._dispatch, events, time.perf_counter()),
            lambda error: in_loop(self._thread_ended, error),
            say,
        )

    @property
    def active(self) -> int:
        """The number of requests in progress."""
        return len(self._generations)

    def check_ready(self) -> None:
        """Raises ApiError unless requests are accepted."""
        if self.state != READY:
            raise unavailable(f"the server is {self.state}", after=5)

    def adapter(self, name: str | None) -> tuple[str, int]:
        return self._reader.adapter(name)

    async def read(self, body: bytes, *, chat: bool) -> Read:
        """Parses a body into a request and the tokens of its prompts. Does not block the event loop.

        Raises:
          ApiError: see `serving.reading.Reader.read`.
        """
        if len(body) > LARGE:
            return await (self._huge if len(body) > HUGE else self._large).read(body, chat)
        return await self._loop.run_in_executor(self._pool, self._reader.read, body, chat)

    def submit(self, query: Query, prompts: list[list[int]], adapter: int, owner: str, received: float) -> Generation:
        """Submits a request to the scheduler. Its choices begin as soon as slots are free.

        Raises:
          ApiError: no requests are accepted, too many prompts are waiting, or a value is not allowed.
        """
        self.check_ready()
        most, count = self.model.config.max_waiting_prompts, len(prompts) * query.n
        if count > most:
            raise ApiError(
                400, f"n times the number of prompts is {count}, but at most {most} prompts may wait", param="n"
            )
        if self.model.scheduler.waiting + count > most:
            slots = self.model.scheduler.engine.max_concurrent_decodes
            after = math.ceil(self._seconds * (1 + most / slots) / 2)
            raise unavailable(f"the queue is full: at most {most} prompts may wait", 429, min(after, 60))
        generation = Generation(self, query, prompts, received)
        seed = self.model.seed if query.seed is None else query.seed
        seed = secrets.randbits(32) if seed is None else seed
        stop = [*self.model.stop, *(self.model.turn_end if query.chat else ())]
        numbers: list[int] = []
        try:
            for choice in range(count):
                row = prompts[choice // query.n]
                limit = query.max_tokens if query.most is None else query.most
                how: dict[str, Any] = {"sampling": query.sampling, "asked": query.asked, "stop": stop, "owner": owner}
                how |= {"limit": None if limit is None else max(limit, 1), "seed": seed, "sample": choice % query.n}
                numbers.append(self.service.submit(row, adapter=adapter, **how))
                self._running[numbers[-1]] = _Running(generation, choice)
        except UserError as error:
            self.release(generation, numbers)
            raise as_api_error(error) from error
        generation.begin(numbers)
        self._generations.add(generation)
        return generation

    def release(self, generation: Generation, numbers: Sequence[int]) -> None:
        """Cancels those choices of `generation` that are still running, and removes `generation` from the requests in
        progress.

        `numbers`: the numbers that the scheduler gave the choices.
        """
        for number in numbers:
            if self._running.pop(number, None):
                self.service.cancel(number)
        if generation in self._generations:
            self._generations.remove(generation)
            self._seconds += (time.perf_counter() - generation.received - self._seconds) / 8

    def drain(self) -> None:
        """Stops accepting requests."""
        if self.state != FAILED:
            self.state = DRAINING

    def end_all(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        for generation in list(self._generations):
            generation.fail(error)

    def close(self) -> None:
        """Ends the threads."""
        self.service.stop()
        self._large.close()
        self._huge.close()
        self._pool.shutdown(cancel_futures=True)

    def _dispatch(self, events: Sequence[Event], when: float) -> None:
        if self.state == STARTING:
            self.state = READY
            self.ready.set()
        for event in events:
            running = self._running.get(event.request)
            if running is None:
                continue
            if event.token is not None:
                self.metrics.generated.inc()
                last, histogram = running.last, self.metrics.between
                if not last:
                    last, histogram = running.generation.received, self.metrics.first
                histogram.observe(when - last)
                running.last = when
            if running.generation.take(running.choice, event) or event.end is not None:
                del self._running[event.request]
                if event.end is None:
                    self.service.cancel(event.request)

    def _thread_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.state = FAILED
            self.ready.set()
            self.end_all(ApiError(500, "the engine has failed", kind="server_error"))
            self._failed()

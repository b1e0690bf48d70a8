"""The evaluated model: it scores tokens and answers prompts, in batches that an inference engine computes."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.config.errors import UserError
from trainer.data.tokenizer import Tokenizer
from trainer.inference.engine import Engine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import LENGTH, STOP, Scheduler
from trainer.inference.text import Chat, TextStream
from trainer.runtime.agreement import from_first

GREEDY = Sampling(0.0)
_EVERY = 10.0  # seconds between two progress messages
_LOOK_SECONDS = 0.5  # seconds between checks whether the run or the task's time has ended


class Interrupted(Exception):  # like KeyboardInterrupt, not an error
    """Ends the evaluation because the run ends."""


class TooLong(UserError):
    """A task exceeds its time limit."""


@contextlib.contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """A context in which a signal handler calls `look` every half second, even while a regular expression is matched.
    An exception from `look` interrupts the code in the context. Outside the main thread, `look` is never called."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = False

    def looks(number: int, frame: Any) -> None:
        if not ended:
            look()

    before = signal.signal(signal.SIGALRM, looks)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    try:
        try:
            yield
        finally:
            ended = True
    finally:  # is executed even if `look` raises an exception in the inner `finally`
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Answer(NamedTuple):
    """The model's answer to a prompt.

    Attributes:
      text: the answer, without the stop text.
      end: what ended the answer: "stop" (a stop token or a stop text), or "length" (the maximum number of tokens).
    """

    text: str
    tokens: list[int]
    end: str


class EvaluatedModel:
    """A model that scores texts and answers prompts.

    Attributes:
      length: the maximum number of tokens of a prompt with its answer; a row for `log_probs` may have one more token.
      chat: converts messages to tokens; None if prompts are texts.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        tokenizer: Tokenizer | None,
        stop: Sequence[int],
        chat: Chat | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        say: Callable[[str], Any] = lambda line: None,
        images: Mapping[int, str] = {},
    ):
        """
        Args:
          params: the result of `engine.hold`.
          tokenizer: None for tasks that need none.
          stop: the tokens that end an answer.
          interrupted: a function that returns whether to raise Interrupted, with the same result in all processes. It
            is called after each batch and, in a `watched` context, by a timer.
          say: a function that is called with a progress message at most every ten seconds.
          images: the image tokens of a multimodal model, see `About.images` in `trainer.leaves.about`.
        """
        self._say, self._said, self._images = say, time.monotonic(), images
        self._engine, self._params, self._interrupted = engine, params, interrupted
        self._tokenizer, self.chat, self._stop = tokenizer, chat, frozenset(stop)
        self.length = int(engine.config.max_target_length)
        self._seconds, self._deadline = 0.0, math.inf

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which can be missing only if all tasks are text tasks. Text tasks do not use this property."""
        assert self._tokenizer is not None
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with the tokenizer's `before_text` tokens at the beginning."""
        return [*self.tokenizer.before_text, *self.tokenizer.encode(text)]

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of a prompt. With use_chat_template=true, the prompt becomes the user's message in a
        conversation."""
        return self.chat.tokens(text) if self.chat else self.encode(text)

    def pair(self, context: str, continuation: str, *, chat: bool = True) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context, and the tokens that a continuation adds. As in lm-eval, context and
        continuation are encoded together, and spaces at the end of the context belong to the continuation.

        Args:
          chat: whether, with use_chat_template=true, the context becomes the user's message, encoded separately.

        Raises:
          UserError: the continuation has no tokens.
        """
        if self.chat and chat:
            before, after = self.chat.tokens(context), self.tokenizer.encode(continuation)
        else:
            stripped = context.rstrip()
            whole, before = self.encode(context + continuation), self.encode(stripped)
            after = whole[len(before) :]
        if not before or not after:
            raise UserError(f"a choice has no tokens after its question: {continuation!r}")
        return before, after

    def begin_task(self, seconds: float) -> None:
        """Sets the time limit of the next task; 0: none. Raises Interrupted if the run ends."""
        self._seconds, self._deadline = seconds, time.monotonic() + seconds if seconds else math.inf
        self.check_goes_on()

    def check_goes_on(self) -> None:
        """Checks whether to continue. All processes must call this method together.

        Raises:
          Interrupted: the run ends.
          TooLong: the task exceeds eval_tasks_timeout_seconds on the first process's clock.
        """
        if self._interrupted():
            raise Interrupted
        if self._deadline < math.inf and from_first(lambda: time.monotonic() > self._deadline):
            raise TooLong(f"it was stopped after {self._seconds:g} s (eval_tasks_timeout_seconds)")

    @contextlib.contextmanager
    def watched(self, busy: Callable[[], bool]) -> Iterator[None]:
        """A context for code that does not call `check_goes_on`: a timer calls `check_goes_on` (see `looking`) unless
        `busy()` returns True. With several processes, the timer does not run."""
        if jax.process_count() > 1:
            yield
            return

        def look() -> None:
            if not busy():
                self.check_goes_on()

        with looking(look):
            yield

    def _passed(self, done: int, total: int, what: str) -> None:
        """Calls `check_goes_on` and reports progress, after `done` of `total` items."""
        self.check_goes_on()
        now = time.monotonic()
        if now - self._said >= _EVERY:
            self._said = now
            self._say(f"{done:,} of {total:,} {what}")

    def log_probs(self, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the results of `Engine.score` for any number of rows of 2 to `length` + 1 tokens.

        Rows of similar length are computed together, the longest first. Equal rows get bitwise equal results if their
        batches have equal shapes.

        Raises:
          UserError: a token stands for an image.
        """
        self._check_no_images(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        size = self._engine.max_concurrent_decodes
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            scored = self._engine.score(self._params, [rows[i] for i in batch])
            found.update(zip(batch, scored, strict=True))
            self._passed(len(found), len(rows), "texts")
        return [found[i] for i in range(len(rows))]

    def log_likelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Returns, for each pair of a context and a continuation, the log-likelihood of the continuation, and whether
        each of its tokens is the most likely one. Contexts that are too long are truncated at their beginning.

        Raises:
          UserError: a context or a continuation has no tokens, a continuation is longer than `length`, or a
            log-likelihood is NaN.
        """
        if any(not before or not after for before, after in pairs):
            raise UserError("a continuation or its context has no tokens")
        if long := [len(after) for _, after in pairs if len(after) > self.length]:
            raise UserError(
                f"an answer has {max(long):,} tokens, but at most {self.length:,} fit: set max_target_length="
                f"{max(long)} or more, or shorten the answer"
            )
        rows = [[*before, *after][-(self.length + 1) :] for before, after in pairs]
        said = self.log_probs(rows)
        found = [
            (float(log_probs[-len(after) :].sum(dtype=np.float64)), bool(likeliest[-len(after) :].all()))
            for (log_probs, likeliest), (_, after) in zip(said, pairs, strict=True)
        ]
        if any(math.isnan(value) for value, _ in found):
            raise UserError("log-likelihoods are NaN, so answers cannot be compared; look for NaN in the parameters")
        return found

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        until: Sequence[Sequence[str]],
        sampling: Sampling = GREEDY,
    ) -> list[Answer]:
        """Returns an answer to each prompt. Prompts must have fewer than `length` tokens.

        Args:
          limits: the maximum number of tokens of each answer.
          until: texts that end each answer and are not part of it.
          sampling: the sampling settings; default: greedy decoding. Prompt i has the seed i.

        Raises:
          UserError: a token stands for an image.
        """
        self._check_no_images(prompts)
        scheduler = Scheduler(self._engine, self._params, fill=True)
        writers: dict[int, _Writer] = {}
        # Prompts are submitted in descending order of length, so that prompts that need the same compiled program
        # follow each other.
        for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
            number = scheduler.submit(prompts[i], limit=limits[i], stop=self._stop, sampling=sampling, seed=i)
            writers[number] = _Writer(i, self.tokenizer, prompts[i], until[i])
        while not scheduler.idle:
            for event in scheduler.turn():
                writer = writers[event.request]
                if not writer.ended and writer.add(event.token, event.end) and event.end is None:
                    scheduler.cancel(event.request)
            self._passed(sum(writer.ended for writer in writers.values()), len(prompts), "answers")
        return [writer.answer for writer in sorted(writers.values(), key=lambda writer: writer.index)]

    def _check_no_images(self, texts: Sequence[Sequence[int]]) -> None:
        for text in texts if self._images else ():
            for token in self._images.keys() & set(text):
                raise UserError(
                    f"a text has the token {token}, which stands for an image ({self._images[token]}); only text can "
                    "be evaluated: leave such questions and documents out"
                )


class _Writer:
    """Collects the tokens of an answer."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], until: Sequence[str]):
        self.index, self.ended, self._until = index, False, [text for text in until if text]
        self._stream, self._text, self._tokens, self._end = TextStream(tokenizer, prompt), "", list[int](), LENGTH

    def add(self, token: int | None, end: str | None) -> bool:
        """Adds `token` unless it is None. `end`: why generation ended; None if it continues. Returns whether the answer
        is complete."""
        if token is not None:
            self._tokens.append(token)
            self._text += self._stream.add(token)
        if end is not None:
            self._text += self._stream.end()
            self._end = end
        if found := [i for i in map(self._text.find, self._until) if i >= 0]:
            self._text, self._end = self._text[: min(found)], STOP
        self.ended = bool(found) or end is not None
        return self.ended

    @property
    def answer(self) -> Answer:
        return Answer(self._text, self._tokens, self._end)

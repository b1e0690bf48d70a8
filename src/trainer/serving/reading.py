"""From the body of a request to tokens. Large bodies are read in a process of their own.

A body of megabytes can take seconds: to parse, to render, to encode, and to find out that it does not fit. In a thread,
this work would hold up the event loop and every other request, because Python runs one thread at a time.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainer.config import UserError
from trainer.data.documents import Record
from trainer.data.tokenizer import Tokenizer
from trainer.inference import Sampling
from trainer.post_training.chat_encoder import Prompts
from trainer.serving.errors import ApiError
from trainer.serving.queries import Query, as_api_error, query, read_json

LARGE = 1 << 13  # bytes of a body; a thread reads smaller ones within about 20 ms

Read = tuple[Query, list[list[int]]]  # a request, and the tokens of its prompts


class Reader(NamedTuple):
    """How bodies become tokens.

    Attributes:
      begin: the tokens before a prompt.
      default: how tokens are drawn for requests that do not say so.
      longest: tokens of a prompt, at most.
      room: tokens of a prompt and of what is generated, at most.
    """

    tokenizer: Tokenizer
    chat: Prompts
    begin: Sequence[int]
    default: Sampling
    longest: int
    room: int

    def read(self, body: bytes, chat: bool) -> Read:
        """Returns the request in a body, and the tokens of its prompts.

        Raises:
          ApiError: the body is no request, its prompts cannot be made, or there are no tokens or too many.
        """
        found = query(read_json(body), chat=chat, default=self.default)
        try:
            rows = [self._tokens(prompt, found) for prompt in found.prompts]
        except UserError as error:
            raise as_api_error(error) from error
        return found, rows

    def _tokens(self, prompt: Any, asked: Query) -> list[int]:
        if asked.chat:
            row = self.chat.tokens_of(Record("messages", (prompt,)))
        else:
            row = [*self.begin, *self.tokenizer.encode(prompt)] if isinstance(prompt, str) else prompt
        name = "messages" if asked.chat else "prompt"
        size, wanted = len(row), asked.max_tokens or 0
        if not row:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        if size > self.longest or size + wanted > self.room:
            raise ApiError(
                400,
                f"the prompt has {size} tokens and max_tokens is {wanted}; a prompt has at most {self.longest} tokens, "
                f"and with what is generated at most {self.room}",
                param=name,
                code="context_length_exceeded",
            )
        return row


class OneAside:
    """A process that reads one body after another. It starts with the first one."""

    def __init__(self, reader: Reader, seconds: float, check: Callable[[], None]):
        """`seconds`: how long it may read one body. `check`: raises ApiError if no body is read any more."""
        self._reader, self._seconds, self._check = reader, seconds, check
        self._lock = asyncio.Lock()
        self._pool: Any = None

    async def read(self, body: bytes, chat: bool) -> Read:
        """See `Reader.read`. Raises ApiError also if it takes too long; the process is then replaced."""
        async with self._lock:
            self._check()
            if self._pool is None:  # a fork would copy the locks of this process's threads
                self._pool = multiprocessing.get_context("spawn").Pool(1, _begin, (self._reader,))
                await asyncio.to_thread(self._pool.apply, int)  # it has loaded what it needs
            result = self._pool.apply_async(_read, (body, chat))
            try:
                return await asyncio.to_thread(result.get, self._seconds)
            except multiprocessing.TimeoutError:
                self.close()
                said = f"the request could not be read within receive_seconds={self._seconds:g}: it is too complex"
                raise ApiError(400, said) from None

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None


_READER: list[Reader] = []


def _begin(reader: Reader) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    _READER[:] = [reader]


def _read(body: bytes, chat: bool) -> Read:
    return _READER[0].read(body, chat)

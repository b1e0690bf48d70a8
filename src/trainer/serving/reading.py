"""Converts the body of a request to tokens. Large bodies are read in separate processes.

Parsing a body of megabytes, rendering its chat template and encoding its prompt can take seconds, even if the prompt
turns out to be too long. In a thread, this work would delay the event loop and every other request, because Python runs
one thread at a time. Bodies of more than LARGE bytes are read in a separate process, and bodies of more than HUGE bytes
in a second one, so that ordinary large bodies, such as long conversations, do not wait for huge bodies.
"""

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from trainer.chat.encoder import Prompts
from trainer.config.errors import UserError
from trainer.data.documents import Record
from trainer.data.tokenizer import Tokenizer
from trainer.inference.sampling import Sampling
from trainer.serving.errors import ApiError, unavailable
from trainer.serving.queries import Query, as_api_error, query, read_json

LARGE, HUGE = 1 << 13, 1 << 16  # body sizes in bytes; a thread reads LARGE bytes in at most about 20 ms
_MOST_WAITING, _START_SECONDS = 64, 120

Read = tuple[Query, list[list[int]]]  # a request, and the tokens of its prompts


class Reader(NamedTuple):
    """Converts bodies to tokens.

    Attributes:
      begin: the tokens to put before a prompt that is given as text.
      default: the values of sampling parameters that a request does not set.
      longest: the maximum number of tokens of a prompt.
      room: the maximum number of tokens of a prompt plus the tokens generated for it.
      adapters: maps the names that requests use for the base and its adapters to numbers: 0 for the base, and 1, 2, ...
        for the adapters.
    """

    tokenizer: Tokenizer
    chat: Prompts
    begin: Sequence[int]
    default: Sampling
    longest: int
    room: int
    adapters: Mapping[str, int]

    def read(self, body: bytes, chat: bool) -> Read:
        """Returns the request in a body, and the tokens of its prompts.

        Raises:
          ApiError: the body is not a valid request, its model is unknown, a prompt cannot be rendered, or a prompt has
            no tokens or too many.
        """
        found = query(read_json(body), chat=chat, default=self.default)
        self.adapter(found.model)
        try:
            rows = [self._tokens(prompt, found) for prompt in found.prompts]
        except UserError as error:
            raise as_api_error(error) from error
        return found, rows

    def adapter(self, name: str | None) -> tuple[str, int]:
        """Returns `name` (default: the first name in `adapters`) and its number. Raises ApiError for unknown names."""
        name = next(iter(self.adapters)) if name is None else name
        if name not in self.adapters:
            there = ", ".join(self.adapters)
            raise ApiError(
                404, f"model={name[:80]}: no such model; available: {there}", param="model", code="model_not_found"
            )
        return name, self.adapters[name]

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
                f"the prompt has {size} tokens and max_tokens is {wanted}; a prompt may have at most {self.longest} "
                f"tokens, and at most {self.room} together with the generated tokens",
                param=name,
                code="context_length_exceeded",
            )
        return row


class OneAside:
    """A separate process that reads bodies one at a time. It is started when the first body arrives."""

    def __init__(self, reader: Reader, seconds: float, check: Callable[[], None]):
        """`seconds`: the time limit for reading one body. `check`: is called before a body is read, and raises ApiError
        if the server no longer reads bodies."""
        self._reader, self._seconds, self._check = reader, seconds, check
        self._thread = ThreadPoolExecutor(1, "large requests")  # the thread that waits for the process
        self._waiting = 0
        self._process: Any = None
        self._ours: Any = None  # this process's end of the pipe

    async def read(self, body: bytes, chat: bool) -> Read:
        """See `Reader.read`. Also raises ApiError if too many bodies are waiting, if the process ends, or if reading
        exceeds the time limit. After a timeout, the process is killed."""
        if self._waiting >= _MOST_WAITING:
            raise unavailable(f"{_MOST_WAITING} large requests are already waiting to be read", 429)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, body, chat)
        finally:
            self._waiting -= 1

    def _read(self, body: bytes, chat: bool) -> Read:
        self._check()
        try:
            if self._process is None:
                self._start()
            self._ours.send((body, chat))
            in_time = self._ours.poll(self._seconds)
            found: Any = self._ours.recv() if in_time else None
        except (OSError, EOFError) as error:
            self._end()
            raise unavailable("the process that reads large requests has ended") from error
        if not in_time:
            self._end()
            said = f"the request could not be read within receive_seconds={self._seconds:g}: it is too complex"
            raise ApiError(400, said)
        if isinstance(found, ApiError):
            raise found
        return found

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._reader), daemon=True)
        self._process.start()
        theirs.close()
        if not self._ours.poll(_START_SECONDS):
            raise EOFError
        self._ours.recv()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._ours.close()
            self._process = None

    def close(self) -> None:
        """Ends the process."""
        if (process := self._process) is not None:
            process.kill()  # closes the pipe, so that a thread that waits for the process stops waiting
        self._thread.shutdown(cancel_futures=True)
        self._end()


def _serve(pipe: Any, reader: Reader) -> None:
    """Reads bodies from the pipe and sends the results back, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the server ends this process
    pipe.send(None)  # reports that the process is ready
    with contextlib.suppress(EOFError, OSError):
        while True:
            body, chat = pipe.recv()
            try:
                pipe.send(reader.read(body, chat))
            except ApiError as error:
                pipe.send(error)

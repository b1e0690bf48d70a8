"""Sends the response to a request. Ends the request if its client disconnects or its time limit is exceeded."""

import asyncio
import json
import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from trainer.serving.answers import Answer
from trainer.serving.errors import ApiError, timed_out
from trainer.serving.front import Generation

_LAST_SECONDS = 2.0  # how long a client may take to receive the error that ends its request


class Reply:
    """An ASGI application that answers with the choices of `generation`, as JSON or as server-sent events."""

    def __init__(self, generation: Generation, answer: Answer, seconds: float):
        """`seconds`: the time limit for the answer, counted from the receipt of the request."""
        self._generation, self._answer, self._seconds = generation, answer, seconds
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone, work = asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(self._send(scope, receive, send))
        left = self._generation.received + self._seconds - time.perf_counter()
        try:
            await asyncio.wait({gone, work}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await self._fail_if_failed(work, scope, receive, send)
            elif not gone.done():
                work.cancel()
                error = timed_out(f"the request was not answered within request_seconds={self._seconds:g}")
                await self._fail(error, scope, receive, send)
        finally:
            self._generation.close()
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _fail_if_failed(self, work: "asyncio.Future[None]", scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work.result()
        except ApiError as error:
            await self._fail(error, scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, answer = self._generation, self._answer
        if not generation.query.stream:
            parts = [part async for part in generation.parts()]
            await self._json(answer.whole(parts), 200, {}, scope, receive, send)
            return
        async for part in generation.parts():
            if not self._started:  # not earlier, so that an error before the first part can set the status
                self._started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._event(answer.chunk(part), send)
        if generation.query.usage:
            await self._event(answer.last_chunk(), send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends an error. Closes the connection if the client does not receive the error within _LAST_SECONDS."""

        async def said() -> None:
            if not self._started:
                await self._json(error.body, error.status, error.headers, scope, receive, send)
                return
            await self._event(error.body, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await asyncio.wait_for(said(), _LAST_SECONDS)
        except TimeoutError:
            scope["state"]["connection"].abort()
            await asyncio.sleep(0.01)  # lets the server detect that the connection is closed

    async def _json(
        self, body: Any, status: int, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._started = True
        await JSONResponse(body, status, headers)(scope, receive, send)

    async def _event(self, body: dict[str, Any], send: Send) -> None:
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def _gone(receive: Receive) -> None:
    """Waits until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""The ASGI application: routes, limits and errors."""

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.serving.access import Access
from trainer.serving.answers import Answer
from trainer.serving.errors import ApiError, timed_out
from trainer.serving.front import READY, Front
from trainer.serving.replies import Reply

_MOST_DISCARDED = 1 << 28  # the most bytes of an oversized body that are read and discarded
_PAGE = Path(__file__).with_name("page.html")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def application(front: Front, access: Access) -> ASGIApp:
    """Returns the ASGI application, which checks requests with `access` and submits them to `front`."""
    routes = Routes(front, access)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        ],
        exception_handlers={ApiError: _error, HTTPException: _error},
    )
    return _counted(app, front)


class Routes:
    """The endpoints."""

    def __init__(self, front: Front, access: Access):
        self._front, self._access, self._config = front, access, front.model.config

    async def page(self, request: Request) -> Response:
        """Returns a page for trying the model."""
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": _POLICY})

    async def health(self, request: Request) -> Response:
        """Returns whether requests are accepted. Any response shows that the process is alive."""
        return JSONResponse({"status": self._front.state}, 200 if self._front.state == READY else 503)

    async def metrics(self, request: Request) -> Response:
        """Returns counts and times for Prometheus."""
        self._owner(request)
        metrics = self._front.metrics
        return Response(metrics.text(), headers={"content-type": metrics.content_type})

    async def models(self, request: Request) -> Response:
        """Returns the entries of all models: the base and its adapters."""
        self._owner(request)
        return JSONResponse({"object": "list", "data": list(map(self._model, self._front.model.adapters))})

    async def model(self, request: Request) -> Response:
        """Returns the entry of the model with a given name."""
        self._owner(request)
        name, _ = self._front.adapter(request.path_params["name"])
        return JSONResponse(self._model(name))

    async def completions(self, request: Request) -> Any:
        """Continues prompts."""
        return await self._generate(request, chat=False)

    async def chat(self, request: Request) -> Any:
        """Answers a conversation."""
        return await self._generate(request, chat=True)

    async def _generate(self, request: Request, *, chat: bool) -> Any:
        front, received = self._front, time.perf_counter()
        owner = self._owner(request)
        front.check_ready()
        body = await self._body(request)
        asked, rows = await front.read(body, chat=chat)
        model, adapter = front.adapter(asked.model)
        owner = owner if self._config.prefix_caching_by_token else ""
        shown = [p if isinstance(p, str) else front.model.tokenizer.decode(p) for p in asked.prompts if asked.echo]
        generation = front.submit(asked, rows, adapter, owner, received)
        return Reply(generation, Answer(generation, model, front.names, shown), self._config.request_seconds)

    def _owner(self, request: Request) -> str:
        return self._access.owner(request.headers.get("authorization"), request.headers.get("host"))

    def _model(self, name: str) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": self._front.created, "owned_by": "trainer"}
        base = next(iter(self._front.model.adapters))
        found |= {"max_model_len": self._config.max_target_length, "chat_template": self._front.model.chat.own_template}
        return found | ({"parent": base} if name != base else {})

    async def _body(self, request: Request) -> bytes:
        """Returns the body. Raises ApiError if its content-type is not JSON, it is too large, or it arrives too late.

        A body that is too large is read to its end and discarded, because a client that is still sending would not see
        the response. The rest of the body is not read if the client sent the header Expect, or if the body is far too
        large.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type={kind[:80] or 'none'}: must be application/json")
        most, body = self._config.max_body_bytes, bytearray()
        too_large = ApiError(413, f"the body has more than max_body_bytes={most} bytes")
        size, left = request.headers.get("content-length", ""), max(most, _MOST_DISCARDED)
        large = size.isdecimal() and int(size[:20]) > most
        if large and (int(size[:20]) > left or "expect" in request.headers):
            raise too_large
        try:
            async with asyncio.timeout(self._config.receive_seconds):
                async for part in request.stream():
                    body += part
                    large, left = large or len(body) > most, left - len(part)
                    if large:
                        body.clear()
                    if left < 0:
                        raise too_large
        except TimeoutError:
            said = f"the body did not arrive within receive_seconds={self._config.receive_seconds:g}"
            error = timed_out(said)
            error.headers["connection"] = "close"
            raise error from None
        if large:
            raise too_large
        return bytes(body)


async def _error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return JSONResponse(error.body, error.status, error.headers)
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:200]
    return JSONResponse(ApiError(error.status_code, f"{where}: {error.detail}").body, error.status_code, error.headers)


def _counted(app: ASGIApp, front: Front) -> ASGIApp:
    """Returns `app`, wrapped to count responses and to ignore the error of a client that disconnects too early."""
    known = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        code = "gone"

        async def noting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await app(scope, receive, noting)
        except ClientDisconnect:
            pass
        finally:
            path = scope["path"] if scope["path"] in known else "other"
            front.metrics.requests.labels(path, code).inc()

    return counting

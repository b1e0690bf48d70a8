"""The server: its socket, connection timeouts, signals, and shutdown."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer.config.errors import RunStopped, UserError
from trainer.serving.access import Access
from trainer.serving.app import application
from trainer.serving.errors import unavailable
from trainer.serving.front import FAILED, READY, Front, Model
from trainer.serving.metrics import Metrics

_KEEP_ALIVE_SECONDS = 30
_GRACE_SECONDS = 5  # seconds after drain_seconds in which clients get errors about the shutdown


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the configured address but does not listen yet. Raises UserError if the address
    is in use or does not exist."""
    with contextlib.ExitStack() as failing:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            found = failing.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except (OSError, UnicodeError) as error:
            raise UserError(_cannot_listen(host, port, error)) from None
        failing.pop_all()
    return found


def _cannot_listen(host: str, port: int, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error
    return f"cannot listen at host={host} port={port}: {reason}; try another port=N, or port=0 for any free port"


def url_of(found: socket.socket) -> str:
    """Returns the URL at which clients reach a bound socket."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves `model` at the bound socket `at`. If `tokens` is not empty, each request must contain one of these access
    tokens. `say`: receives a line for each compiled program."""

    def __init__(
        self,
        model: Model,
        at: socket.socket,
        tokens: Sequence[str] = (),
        say: Callable[[str], object] = lambda line: None,
    ):
        self._model, self._at, self._tokens, self._say = model, at, tokens, say
        self._signals: list[int] = []

    def run(self, ready: Callable[[], object]) -> None:
        """Serves until SIGTERM, Ctrl-C or `stop`. Then finishes the accepted requests, for at most drain_seconds. A
        second signal ends the server immediately. `ready` is called as soon as the server accepts requests.

        Raises:
          UserError: another program listens at the address.
          RunStopped: the scheduler's thread has failed.
          KeyboardInterrupt: Ctrl-C ended the server.
        """
        asyncio.run(self._run(ready))

    def stop(self) -> None:
        """Acts like SIGTERM; does nothing if the server has ended. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, signal.SIGTERM)

    async def _run(self, ready: Callable[[], object]) -> None:
        config, self._loop = self._model.config, asyncio.get_running_loop()
        self._front = front = Front(self._model, Metrics(self._model.scheduler), self._exit, self._say)
        self._inner = _Inner(
            uvicorn.Config(
                application(front, Access(self._tokens)),
                http=_protocol(config.receive_seconds),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=round(config.drain_seconds) + _GRACE_SECONDS,
            )
        )
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._end, number)
        front.service.start()
        telling = asyncio.ensure_future(self._tell(ready))
        try:
            await self._inner.serve(sockets=[self._at])
        except OSError as error:
            raise UserError(_cannot_listen(config.host, config.port, error)) from None
        finally:
            telling.cancel()
            front.close()
        if front.state == FAILED:
            raise RunStopped("the engine has failed with the error above; its requests were answered with status 500")
        if signal.SIGINT in self._signals:
            raise KeyboardInterrupt

    async def _tell(self, ready: Callable[[], object]) -> None:
        await self._front.ready.wait()
        if self._front.state == READY:
            ready()

    def _end(self, number: int) -> None:
        self._inner.force_exit = bool(self._signals)
        self._signals.append(number)
        self._front.drain()
        self._loop.call_later(
            self._model.config.drain_seconds, self._front.end_all, unavailable("the server is shutting down")
        )
        self._exit()

    def _exit(self) -> None:
        self._inner.should_exit = True


class _Inner(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # does not handle signals: `Server` handles them, so that the exit code after SIGTERM is 0


def _protocol(seconds: float) -> type[H11Protocol]:
    """Returns a protocol that closes a connection if no complete request header arrives within `seconds`."""

    class Protocol(H11Protocol):
        def __init__(self, *, app_state: dict[str, Any], **kwargs: Any):
            super().__init__(app_state={**app_state, "connection": self}, **kwargs)
            self._waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def abort(self) -> None:
            """Closes the connection without waiting for the client."""
            self.transport.abort()

        def _wait(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering or self.transport.is_closing():
                self._stop_waiting()
            elif self._waiting is None:
                self._waiting = self.loop.call_later(seconds, self.abort)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return Protocol

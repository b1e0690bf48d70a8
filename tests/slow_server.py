"""A web server for a folder, on this machine: slow, with faults, and with counts of what it sent."""

import contextlib
import hashlib
import http.server
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

FAULTS = ("503", "reset", "late", "cut")


class SlowServer(http.server.ThreadingHTTPServer):
    """Serves byte ranges of the files in `root`, and index pages for the folders.

    Attributes:
      delay: seconds before each response.
      faults: what happens to the next GET requests of files: one of FAULTS, a status, or "" for nothing.
      listing: the same for the next GET requests of folders.
      marks: whether responses have an ETag.
      ranges: whether range requests are honored.
      sent: the number of bytes of files that were sent.
      requests: (method, path, range) of each request.
      late: the extra delay of a late response in seconds.
    """

    daemon_threads = True
    request_queue_size = 128  # pending connections; more than clients open at a time

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.delay, self.marks, self.late = root, 0.0, True, 0.4
        self.faults: Iterator[str] = itertools.repeat("")
        self.listing: Iterator[str] = itertools.repeat("")
        self.ranges = True
        self.sent, self.requests, self.lock = 0, [], threading.Lock()

    @property
    def url(self) -> str:
        """The address of `root`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fail(self, faults: Iterable[str]) -> None:
        """Sets the faults of the next requests; later requests have none."""
        self.faults = itertools.chain(faults, itertools.repeat(""))

    def count(self, sent: int) -> None:
        """Adds to the bytes of files that were sent."""
        with self.lock:
            self.sent += sent

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients close connections before they have read the response


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body waits until the client has acknowledged the headers
    server: SlowServer

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server, path = self.server, self.server.root / unquote(urlsplit(self.path).path).lstrip("/")
        with server.lock:
            server.requests.append((self.command, self.path, self.headers.get("Range")))
            fault = next(server.faults if path.is_file() else server.listing, "") if body else ""
        time.sleep(server.delay + (server.late if fault == "late" else 0))
        if fault.isdecimal():
            return self._send(int(fault), b"", body)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        if path.is_dir():
            names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
            links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
            self._send(200, links.encode(), body, {"Content-Type": "text/html"})
            return self.server.count(-len(links) * body)
        if not path.is_file():
            return self._send(404, b"", body)
        data = path.read_bytes()
        mark = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.headers.get("If-Match", mark) != mark:
            return self._send(412, b"", body)
        status, headers = 200, {"ETag": mark} if server.marks else {}
        if (given := self.headers.get("Range")) and server.ranges:
            start, _, stop = given.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {start}-{stop}/{len(data)}"
            status, data = 206, data[int(start) : int(stop) + 1]
        return self._send(status, data, body, headers, cut=fault == "cut")

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None, cut: bool = False):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            data = data[: len(data) // 2] if cut else data
            self.server.count(len(data))
            self.wfile.write(data)
        self.close_connection = self.close_connection or cut

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(root: Path) -> Iterator[SlowServer]:
    """Serves a folder until the end of the context."""
    with SlowServer(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

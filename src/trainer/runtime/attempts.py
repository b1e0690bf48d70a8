"""Requests to remote file systems through fsspec, with time limits and retries."""

import contextlib
import functools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import quote

from trainer.config.errors import UserError, shortened
from trainer.config.paths import EXTRAS, url_problem, without_secrets
from trainer.config.words import visible

T = TypeVar("T")

TRIES, SECONDS = 8, 60.0  # attempts for each request, and the time limit of one attempt in seconds
LISTING = 1800.0  # time limit in seconds for listing a folder
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds: the first and the longest wait between attempts; waits double
_PASSING = (408, 412, 425, 429, 500, 502, 503, 504)  # HTTP statuses after which a retry may succeed
# Names of connection errors in aiohttp, httpx, botocore and google.auth that are not subclasses of OSError.
_BROKEN = {"ClientConnectionError", "ClientPayloadError", "TransportError", "HTTPClientError", "ConnectionError"}
_OFFLINE, _OURS = "HF_HUB_OFFLINE", "TRAINER_TURNED_HUB_OFF"  # environment variables, which child processes inherit
COPY = "copy the file to this machine"  # advice at the end of several messages


def is_http(url: str) -> bool:
    """Returns whether the file is on a web server."""
    return url.startswith(("http://", "https://"))


def system_of(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in that file system.

    Raises UserError if the URL is invalid, a package is missing, or HF_HUB_OFFLINE forbids requests to the Hugging Face
    hub.
    """
    if problem := url_problem(url):
        raise UserError(f"{shortened(url)}: {problem}")
    scheme = url.partition("://")[0]
    if scheme == "hf":
        if os.environ.get(_OFFLINE, "0").upper() in ("1", "ON", "YES", "TRUE") and _OURS not in os.environ:
            raise UserError(f"{url} is on the hub, and {_OFFLINE} forbids requests to it; unset it, or {COPY}")
        with contextlib.suppress(ImportError):
            import huggingface_hub.constants

            huggingface_hub.constants.HF_HUB_OFFLINE = False  # `turn_hub_off` may have set HF_HUB_OFFLINE
    try:
        system = _opened("http" if scheme == "https" else scheme)
    except ImportError as error:
        raise UserError(f"{url}: a package is missing: pip install 'trainer[{EXTRAS[scheme]}]'") from error
    if scheme in ("http", "https"):
        return system, quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # keeps existing percent escapes
    return system, system._strip_protocol(url)


def turn_hub_off() -> None:
    """Prevents packages from sending requests to the Hugging Face hub. This module can still read data at hf://."""
    if _OFFLINE not in os.environ:
        os.environ[_OFFLINE] = os.environ[_OURS] = "1"


@functools.cache
def _opened(scheme: str) -> Any:
    """Returns the file system of a URL scheme. All threads share it, because fsspec would open separate connections for
    each thread."""
    import fsspec

    if scheme != "http":
        return fsspec.filesystem(scheme, **({} if scheme == "hf" else {"use_listings_cache": False}))
    import aiohttp

    client = {
        "headers": {"Accept-Encoding": "identity"},
        "trust_env": True,
        "timeout": aiohttp.ClientTimeout(total=None, sock_connect=SECONDS / 2),
    }
    return fsspec.filesystem("http", client_kwargs=client, encoded=True)


os.register_at_fork(after_in_child=_opened.cache_clear)


def call(system: Any, method: str, *arguments: Any, limit: float | None = None, **options: Any) -> Any:
    """Calls a method of a file system. The time limit `limit` (default: SECONDS) applies only to async file systems."""
    if not system.async_impl:
        return getattr(system, method)(*arguments, **options)
    from fsspec.asyn import sync

    return sync(system.loop, getattr(system, f"_{method}"), *arguments, timeout=limit or SECONDS, **options)


def ranged(system: Any, url: str, start: int, stop: int, size: int, headers: Mapping[str, str]) -> bytes:
    """Returns the bytes [start, stop) of a file of `size` bytes on a web server.

    Raises UserError, before reading the content, if the server does not support range requests.
    """

    async def request() -> bytes:
        session = await system.set_session()
        given = {**headers, "Range": f"bytes={start}-{stop - 1}"}
        async with session.get(system.encode_url(url), headers=given) as answer:
            system._raise_not_found_for_status(answer, url)
            if answer.status != 206 and (start, stop) != (0, size):
                raise UserError(f"{without_secrets(url)}: the server does not support range requests; {COPY}")
            return await answer.read()

    from fsspec.asyn import sync

    return sync(system.loop, request, timeout=SECONDS)


def patiently(url: str, call: Callable[[], T]) -> T:
    """Returns `call()`. Retries after transient errors, up to TRIES attempts in total, with increasing waits.

    Raises:
      UserError: the last attempt failed, or an error is not transient.
    """
    tried, url = 0, without_secrets(url)
    while True:
        tried += 1
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # the file systems' errors have no common class
            reason, passes = _reason(error)
            if not passes:
                raise UserError(f"{url} cannot be read: {reason}") from error
            if tried == TRIES:
                raise UserError(
                    f"{url} cannot be read: after {TRIES} attempts it still {reason}; check the server and the "
                    "connection, and run the same command again"
                ) from error
        wait = random.uniform(0.5, 1) * min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tried - 1))
        if tried > 1:
            line = visible(f"{url} {reason}; try {tried + 1} of {TRIES} in {wait:.1f} s")
            print(line, file=sys.stderr, flush=True)
        time.sleep(wait)


def _reason(error: BaseException) -> tuple[str, bool]:
    """Returns why a request failed, as a phrase for a message, and whether another attempt may succeed."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)  # fsspec turns every look-up error into FileNotFoundError
    status = status_of(error)
    if status in _PASSING:
        return f"answers {status}", True
    if status in (401, 403) or isinstance(error, PermissionError) or str(error).startswith("Forbidden"):  # gcsfs
        return f"access is refused ({status or error}); check the credentials, and that the URL is still valid", False
    if status in (404, 410) or isinstance(error, FileNotFoundError | IsADirectoryError):
        return "there is no such file; check the URL", False
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if status is not None:
        return f"the answer is {status} ({text})", False
    if isinstance(error, TimeoutError):
        return f"does not answer within {SECONDS:.0f} s", True
    if type(error) is ConnectionError:
        return str(error), True
    passes = isinstance(error, OSError) or not _BROKEN.isdisjoint(base.__name__ for base in type(error).__mro__)
    return (f"fails ({text})" if passes else text), passes


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status of an error that a file system raised; None if the error has no HTTP status."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):  # botocore
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = getattr(error, "status", None) or getattr(answer, "status_code", None) or getattr(error, "code", None)
    if isinstance(found, int | str) and str(found).isdecimal():
        return int(found)
    # s3fs replaces botocore's errors with OSErrors and keeps them as causes.
    return status_of(error.__cause__) if isinstance(error, OSError) and error.__cause__ is not None else None


def later(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Calls `call(*arguments)` in a daemon thread. Returns a Future for the result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # `Future.result` raises the error
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future

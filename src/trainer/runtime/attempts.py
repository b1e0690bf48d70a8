"""Requests to file systems on other machines, through fsspec: the packages, time limits, and repeated attempts."""

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

TRIES, SECONDS = 8, 60.0  # attempts for each request, and the time limit of one attempt
LISTING = 1800.0  # seconds for listing the files of a pattern
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts; doubled after each
_PASSING = (408, 412, 425, 429, 500, 502, 503, 504)  # HTTP statuses that another attempt may not get
# The classes of errors of a connection that are not errors of the system, in aiohttp, httpx, botocore and google.auth.
_BROKEN = {"ClientConnectionError", "ClientPayloadError", "TransportError", "HTTPClientError", "ConnectionError"}
_OFFLINE, _OURS = "HF_HUB_OFFLINE", "TRAINER_TURNED_HUB_OFF"  # environment variables; children inherit both
COPY = "copy the file to this machine"  # the end of messages


def is_http(url: str) -> bool:
    """Returns whether the file is on a web server."""
    return url.startswith(("http://", "https://"))


def system_of(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it. Raises UserError if the scheme or a package is missing."""
    if problem := url_problem(url):
        raise UserError(f"{shortened(url)}: {problem}")
    scheme = url.partition("://")[0]
    if scheme == "hf":
        if os.environ.get(_OFFLINE, "0").upper() in ("1", "ON", "YES", "TRUE") and _OURS not in os.environ:
            raise UserError(f"{url} is on the hub, and {_OFFLINE} forbids requests to it; unset it, or {COPY}")
        with contextlib.suppress(ImportError):
            import huggingface_hub.constants

            huggingface_hub.constants.HF_HUB_OFFLINE = False  # `turn_hub_off` may have set it
    try:
        system = _opened("http" if scheme == "https" else scheme)
    except ImportError as error:
        raise UserError(f"{url}: a package is missing: pip install 'trainer[{EXTRAS[scheme]}]'") from error
    if scheme in ("http", "https"):
        return system, quote(url, safe="%/:=&?~#+!$,;'@()*[]")  # escapes that are there stay
    return system, system._strip_protocol(url)


def turn_hub_off() -> None:
    """Keeps packages that ask the hub by themselves from doing so. Data at hf:// are still read."""
    if _OFFLINE not in os.environ:
        os.environ[_OFFLINE] = os.environ[_OURS] = "1"


@functools.cache
def _opened(scheme: str) -> Any:
    """Returns the file system. fsspec would make one for each thread, and each would connect again."""
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
    """Calls a method of a file system, within `limit` seconds if the system allows it. Default: SECONDS."""
    if not system.async_impl:
        return getattr(system, method)(*arguments, **options)
    from fsspec.asyn import sync

    return sync(system.loop, getattr(system, f"_{method}"), *arguments, timeout=limit or SECONDS, **options)


def ranged(system: Any, url: str, start: int, stop: int, size: int, headers: Mapping[str, str]) -> bytes:
    """Returns the bytes [start, stop) of a file of `size` bytes on a web server.

    Raises UserError, before the answer is read, if the server does not answer with ranges.
    """

    async def request() -> bytes:
        session = await system.set_session()
        given = {**headers, "Range": f"bytes={start}-{stop - 1}"}
        async with session.get(system.encode_url(url), headers=given) as answer:
            system._raise_not_found_for_status(answer, url)
            if answer.status != 206 and (start, stop) != (0, size):
                raise UserError(f"{without_secrets(url)}: the server does not answer with ranges of a file; {COPY}")
            return await answer.read()

    from fsspec.asyn import sync

    return sync(system.loop, request, timeout=SECONDS)


def patiently(url: str, call: Callable[[], T]) -> T:
    """Returns `call()`. Repeats it after an error that may pass, at most TRIES times, and waits longer each time.

    Raises:
      UserError: the last reason, or a reason that will not pass.
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
    """Returns why a request failed, in words that follow the URL, and whether another attempt may succeed."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)  # fsspec reports all errors of a look-up in this way
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
    """Returns the HTTP status of an error of any of the file systems."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):  # botocore
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = getattr(error, "status", None) or getattr(answer, "status_code", None) or getattr(error, "code", None)
    if isinstance(found, int | str) and str(found).isdecimal():
        return int(found)
    # s3fs raises errors of the system for those of botocore.
    return status_of(error.__cause__) if isinstance(error, OSError) and error.__cause__ is not None else None


def later(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Calls a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # raised where the result is needed
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future

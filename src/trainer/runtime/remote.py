"""Data files on other machines: found by pattern, and read by ranges through fsspec, with read-ahead and retries.

A `RemoteFile` has the methods of pathlib.Path that the readers of data use, so that they read both kinds of files.
"""

import functools
import glob
import io
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote

from trainer.config.errors import UserError, shortened
from trainer.config.paths import EXTRAS, local_path, url_problem
from trainer.runtime.copies import Copies

T = TypeVar("T")

TRIES, SECONDS = 8, 60.0  # attempts for each request, and the time limit of one attempt
_LISTING = 1800.0  # seconds for listing the files of a pattern
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts; doubled after each
_FIRST, _BLOCK = 1 << 18, 1 << 22  # bytes of the first block of a file, and of the largest; doubled after each
_TOGETHER = 16  # files that are looked up at the same time
_PASSING = (408, 412, 425, 429, 500, 502, 503, 504)  # HTTP statuses that another attempt may not get
# The classes of errors of a connection that are not errors of the system, in aiohttp, httpx, botocore and google.auth.
_BROKEN = {"ClientConnectionError", "ClientPayloadError", "TransportError", "HTTPClientError", "ConnectionError"}
# What distinguishes two contents of a file, by the names that file systems use, the best first. Those before _TIMES
# are equal only for equal contents.
_CONTENTS = ("md5Hash", "generation", "blob_id", "ETag", "etag", "Content-MD5")
_TIMES = ("Last-Modified", "LastModified", "updated", "mtime", "created")


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file as it was when it was found. Reading it later raises UserError if it has changed.

    Attributes:
      url: its address.
      size: in bytes.
      marks: what distinguishes this content from others, by the names of the file system.
      copies: where to keep a copy, for formats that cannot be read by ranges.
    """

    url: str
    size: int = field(compare=False)
    marks: Mapping[str, str] = field(compare=False)
    copies: Copies = field(compare=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return unquote(PurePosixPath(self.address).name)

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def address(self) -> str:
        """The URL without its query, which often holds a signature that expires."""
        return self.url.partition("?")[0] if _is_http(self.url) else self.url

    @property
    def content(self) -> str | None:
        """A text that differs between contents at this address; None if the file system has none."""
        found = next((f"{name} {self.marks[name]}" for name in _CONTENTS if name in self.marks), "W/")
        return None if "W/" in found else f"{self.address}\0{self.size}\0{found}"

    def stat(self) -> Any:
        """Returns the size as `st_size`."""
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb", buffering: int = -1, stop: int | None = None) -> Any:
        """Opens the file for reading bytes. Without buffering, each read requests exactly its range. Otherwise the file
        is read in blocks, one block ahead. Nothing after `stop` is requested ahead."""
        assert mode == "rb"
        if not buffering:
            return _Reader(self, None)
        return io.BufferedReader(_Reader(self, self.size if stop is None else min(stop, self.size)))

    def read_bytes(self) -> bytes:
        """Returns the content."""
        with self.open(buffering=0) as file:
            return file.read(self.size)

    def copied(self) -> io.FileIO:
        """Opens the local copy of the file, which is made if necessary, and not removed while it is open."""
        return self.copies.open(self)

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes [start, stop) in blocks that grow. One block is requested ahead, nothing after `stop`."""
        size, many = _FIRST if stop - start > _BLOCK else _BLOCK, stop - start > _BLOCK
        ahead = _later(self._fetch, start, min(start + size, stop))
        while start < stop:
            data = ahead.result()
            start, size = start + len(data), min(2 * size, _BLOCK)
            if start < stop:
                ahead = _later(self._fetch, start, min(start + size, stop))
            elif many and stop == self.size:
                self.check()  # a change since the file was opened
            yield data

    def check(self) -> None:
        """Raises UserError if the file is not the same as when it was found."""
        now = _found(self.url, self.copies)
        name = next((name for name in (*_CONTENTS, *_TIMES) if name in self.marks and name in now.marks), "")
        changes = [("size", self.size, now.size), (name, self.marks.get(name), now.marks.get(name))]
        if changed := [f"{what} {before} -> {after}" for what, before, after in changes if before != after]:
            raise UserError(
                f"{self.url} changed while it was read: {', '.join(changed)}; put the former file there again, or "
                "start a new run with the new one"
            )

    def _fetch(self, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop)."""
        system, path = _system(self.url)
        options: dict[str, Any] = {} if system.async_impl else {"cache_type": "none"}
        if _is_http(self.url) and self.content and "ETag" in self.marks:
            options["headers"] = {"If-Match": self.marks["ETag"]}

        def fetch() -> bytes:
            try:
                data = _call(system, "cat_file", path, start=start, end=stop, **options)
            except Exception as error:
                if _status(error) in (412, 416):
                    self.check()
                    options.pop("headers", None)  # the server compares in another way
                raise
            if len(data) > stop - start:
                raise UserError(f"{self.url}: the server does not answer with ranges of a file; {_COPY}")
            if len(data) < stop - start:
                self.check()
                raise ConnectionError(f"answers with {len(data)} of {stop - start} bytes")
            return data

        return _patiently(self.url, fetch)


_COPY = "copy the file to this machine"


class _Reader(io.RawIOBase):
    """Reads a remote file from any position; see `RemoteFile.open`. `stop` None: without buffering."""

    def __init__(self, file: RemoteFile, stop: int | None):
        self._file, self._stop, self._at = file, stop, 0
        self._blocks: Iterator[bytes] = iter(())
        self._block, self._end = b"", -1  # the rest of a block, and the position of its end in the file
        self._unchanged: Future[None] | None = _later(file.check)  # while the first bytes are requested

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._file.size)
        if self._at >= stop:
            return 0
        if self._stop is None:
            data = b"".join(self._file.blocks(self._at, stop))
        else:
            data = self._ahead(stop - self._at, self._stop)
        if self._unchanged is not None:
            self._unchanged.result()
            self._unchanged = None
        memoryview(buffer)[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _ahead(self, most: int, stop: int) -> bytes:
        """Returns 1 to `most` bytes at the position, from blocks that continue to `stop`."""
        if self._at != self._end - len(self._block):
            self._blocks, self._block, self._end = iter(()), b"", self._at
        if not self._block:
            block = next(self._blocks, b"")
            if not block:
                after = min(self._at + _FIRST, self._file.size)  # one block at a time after `stop`
                self._blocks = self._file.blocks(self._at, stop if self._at < stop else after)
                block = next(self._blocks)
            self._block = block
            self._end += len(block)
        data, self._block = self._block[:most], self._block[most:]
        return data


def data_files(pattern: str, copies: Copies) -> list[Any]:
    """Returns the files that match a glob, sorted: paths on this machine, or `RemoteFile`s if it is a URL.

    Raises UserError if the path is invalid, or the files cannot be looked up.
    """
    if "://" not in pattern:
        paths = map(Path, glob.glob(str(local_path(pattern)), recursive=True))
        return sorted(path for path in paths if path.is_file())
    if not glob.has_magic(pattern.replace("?", "") if _is_http(pattern) else pattern):
        return [_found(pattern, copies)]
    system, path = _system(pattern)
    found = _patiently(pattern, lambda: _call(system, "glob", path, limit=_LISTING, detail=True))
    scheme = pattern.partition("://")[0]
    urls = {
        name if "://" in name else f"{scheme}://{name.lstrip('/')}": info
        for name, info in found.items()
        if info["type"] == "file"
    }
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return sorted(pool.map(lambda url: _of_info(url, urls[url], copies) or _found(url, copies), urls))


def data_file(text: str, copies: Copies) -> Any:
    """Returns one file: a path on this machine, or a `RemoteFile`, which must exist."""
    return _found(text, copies) if "://" in text else local_path(text)


def each(make: Callable[[Any], T], files: Sequence[Any]) -> list[T]:
    """Returns `make(file)` for each file, for several remote files at a time."""
    if not any(isinstance(file, RemoteFile) for file in files):
        return [make(file) for file in files]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(make, files))


def _found(url: str, copies: Copies) -> RemoteFile:
    system, path = _system(url)
    # The hub's listings are cached by default, and have no marks.
    fresh = {"refresh": True, "expand_info": True} if url.startswith("hf://") else {}
    info = _patiently(url, lambda: _call(system, "info", path, **fresh))
    if info.get("type") == "directory":
        raise UserError(f"{url} is a folder; name its files, such as {url.rstrip('/')}/*")
    if file := _of_info(url, info, copies, marked=False):
        return file
    raise UserError(f"{url}: the server does not tell the size of the file; {_COPY}")


def _of_info(url: str, info: Mapping[str, Any], copies: Copies, marked: bool = True) -> RemoteFile | None:
    """Returns the file that `info` describes; None without a size, or, with `marked`, without a mark of its content:
    listings and look-ups write times in different ways."""
    marks = {name: str(info[name]) for name in (*_CONTENTS, *_TIMES) if info.get(name)}
    unmarked = marked and marks.keys().isdisjoint(_CONTENTS)
    return None if info.get("size") is None or unmarked else RemoteFile(url, info["size"], marks, copies)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it. Raises UserError if the scheme or a package is missing."""
    if problem := url_problem(url):
        raise UserError(f"{shortened(url)}: {problem}")
    scheme = url.partition("://")[0]
    if scheme == "hf" and os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        raise UserError(f"{url} is on the hub, and HF_HUB_OFFLINE forbids requests to it; unset it, or {_COPY}")
    try:
        system = _open_system("http" if scheme == "https" else scheme)
    except ImportError as error:
        raise UserError(f"{url}: a package is missing: pip install 'trainer[{EXTRAS[scheme]}]'") from error
    return system, system._strip_protocol(url)


@functools.cache
def _open_system(scheme: str) -> Any:
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
    return fsspec.filesystem("http", client_kwargs=client)


os.register_at_fork(after_in_child=_open_system.cache_clear)


def _call(system: Any, method: str, *arguments: Any, limit: float | None = None, **options: Any) -> Any:
    """Calls a method of a file system, within `limit` seconds if the system allows it. Default: SECONDS."""
    if not system.async_impl:
        return getattr(system, method)(*arguments, **options)
    from fsspec.asyn import sync

    return sync(system.loop, getattr(system, f"_{method}"), *arguments, timeout=limit or SECONDS, **options)


def _patiently(url: str, call: Callable[[], T]) -> T:
    """Returns `call()`. Repeats it after an error that may pass, at most TRIES times, and waits longer each time.

    Raises:
      UserError: the last reason, or a reason that will not pass.
    """
    for tried in itertools.count(1):
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
                    f"{url} cannot be read: it {reason}, the last of {TRIES} attempts; check the server and the "
                    "connection, and run the same command again"
                ) from error
        wait = random.uniform(0.5, 1) * min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tried - 1))
        if tried > 1:
            print(f"{url} {reason}; try {tried + 1} of {TRIES} in {wait:.1f} s", file=sys.stderr, flush=True)
        time.sleep(wait)
    raise AssertionError


def _reason(error: BaseException) -> tuple[str, bool]:
    """Returns why a request failed, in words that follow the URL, and whether another attempt may succeed."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _reason(error.__cause__)  # fsspec reports all errors of a look-up in this way
    status = _status(error)
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


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error of any of the file systems."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):  # botocore
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = getattr(error, "status", None) or getattr(answer, "status_code", None) or getattr(error, "code", None)
    if isinstance(found, int | str) and str(found).isdecimal():
        return int(found)
    # s3fs raises errors of the system for those of botocore.
    return _status(error.__cause__) if isinstance(error, OSError) and error.__cause__ is not None else None


def _later(call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Calls a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # raised where the result is needed
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future

"""Remote data files: lookup by glob, and range reads through fsspec, with read-ahead and retries.

A `RemoteFile` has the methods of pathlib.Path that the data readers use, so the readers accept both types.
"""

import errno
import glob
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar

from fsspec.utils import glob_translate

from trainer.config.errors import UserError
from trainer.config.paths import local_path, without_secrets
from trainer.runtime.attempts import COPY, LISTING, call, is_http, later, patiently, ranged, status_of, system_of
from trainer.runtime.copies import Copies

T = TypeVar("T")

_FIRST, _BLOCK = 1 << 18, 1 << 22  # bytes of the first and of the largest block; sizes double from block to block
_BUFFER = 1 << 16  # size of the buffer that `io.BufferedReader` fills
_TOGETHER = 16  # files that are looked up concurrently
# Names, in different file systems, of properties that change with a file's content; the most reliable are first. Values
# of _CONTENTS are equal only for equal contents; values of _TIMES may be equal for different contents.
_CONTENTS = ("md5Hash", "Content-MD5", "generation", "blob_id", "ETag", "etag")
_TIMES = ("Last-Modified", "LastModified", "updated", "mtime", "created")


@dataclass(frozen=True, order=True)
class RemoteFile:
    """One version of a remote file. Reading raises UserError if the file has changed since this object was created.

    Attributes:
      url: the address of the file.
      size: the size in bytes.
      marks: properties that identify the file's version, such as ETag, under the names that the file system uses.
      copies: the folder for a local copy, for formats that cannot be read by ranges.
    """

    url: str
    size: int = field(compare=False)
    marks: Mapping[str, str] = field(compare=False)
    copies: Copies = field(compare=False)

    def __str__(self) -> str:
        return without_secrets(self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.address).name

    @property
    def suffix(self) -> str:
        """The extension: the end of the name, from its last dot."""
        return PurePosixPath(self.name).suffix

    @property
    def address(self) -> str:
        """The URL without a password and without its query, which often contains a temporary signature."""
        return without_secrets(self.url).removesuffix("?...")

    @property
    def content(self) -> str | None:
        """A text that identifies the content; None if no property of the file identifies its content reliably."""
        name = next((name for name in _CONTENTS if name in self.marks), None)
        if name is None or self.marks[name].startswith("W/"):  # a weak ETag may be equal for different contents
            return None
        return f"{self.address}\0{self.size}\0{name} {self.marks[name]}"

    def stat(self) -> Any:
        """Returns the size as `st_size`."""
        return SimpleNamespace(st_size=self.size)

    def open(self, mode: str = "rb", buffering: int = -1, stop: int | None = None) -> Any:
        """Opens the file for reading bytes. With `buffering=0`, each read requests exactly its range. Otherwise the
        file is read in blocks, with one block of read-ahead. Read-ahead does not extend beyond `stop`."""
        assert mode == "rb"
        if not buffering:
            return _Reader(self, None)
        return io.BufferedReader(_Reader(self, self.size if stop is None else min(stop, self.size)), _BUFFER)

    def ends(self, most: int) -> bytes:
        """Returns the first and the last `most` bytes, joined without overlap."""
        first = min(most, self.size)
        return self._fetch(0, first) + self._fetch(max(first, self.size - most), self.size) if first else b""

    def read_bytes(self) -> bytes:
        """Returns the content."""
        with self.open(buffering=0) as file:
            return file.read(self.size)

    def copied(self) -> io.FileIO:
        """Opens a local copy of the file, and creates the copy first if necessary. An open copy is not removed."""
        return self.copies.open(self)

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes [start, stop) in blocks of growing size, with one block of read-ahead."""
        size, many = _FIRST if stop - start > _BLOCK else _BLOCK, stop - start > _BLOCK
        ahead = later(self._fetch, start, min(start + size, stop))
        while start < stop:
            data = ahead.result()
            start, size = start + len(data), min(2 * size, _BLOCK)
            if start < stop:
                ahead = later(self._fetch, start, min(start + size, stop))
            elif many:
                self.check()  # detects changes since the file was opened
            yield data

    def check(self) -> None:
        """Looks the file up again. Raises UserError if it has changed since this object was created."""
        now = _found(self.url, self.copies)
        name = next((name for name in (*_CONTENTS, *_TIMES) if name in self.marks and name in now.marks), "")
        changes = [("size", self.size, now.size), (name, self.marks.get(name), now.marks.get(name))]
        if changed := [f"{what} {before} -> {after}" for what, before, after in changes if before != after]:
            raise UserError(
                f"{self} changed while it was read: {', '.join(changed)}; restore the old file, or start a new run "
                "with the new file"
            )

    def _fetch(self, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop)."""
        if start == stop:
            return b""
        system, path = system_of(self.url)
        options: dict[str, Any] = {} if system.async_impl else {"cache_type": "none"}
        if is_http(self.url) and self.content and "ETag" in self.marks:
            options["headers"] = {"If-Match": self.marks["ETag"]}

        def fetch() -> bytes:
            try:
                if is_http(self.url):
                    data = ranged(system, path, start, stop, self.size, options.get("headers", {}))
                else:
                    data = call(system, "cat_file", path, start=start, end=stop, **options)
            except Exception as error:
                if status_of(error) in (412, 416):
                    self.check()
                    options.pop("headers", None)  # the file is unchanged: this server rejects even a valid ETag
                raise
            if len(data) < stop - start:
                self.check()
                raise ConnectionError(f"answers with {len(data)} of {stop - start} bytes")
            return data

        return patiently(self.url, fetch)


class _Reader(io.RawIOBase):
    """A raw stream over a `RemoteFile`; see `RemoteFile.open`. `stop`: the position at which read-ahead ends; None: no
    read-ahead."""

    def __init__(self, file: RemoteFile, stop: int | None):
        self._file, self._stop, self._at = file, stop, 0
        self._blocks: Iterator[bytes] = iter(())
        self._block, self._end = memoryview(b""), -1  # the unread rest of a block, and the file position of its end
        self._unchanged: Future[None] | None = later(file.check)  # runs concurrently with the first request

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._file.size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._file.size)
        if self._at >= stop:
            return 0
        data: bytes | memoryview
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

    def _ahead(self, most: int, stop: int) -> memoryview:
        """Returns 1 to `most` bytes from the current position, with read-ahead up to `stop`."""
        if self._at != self._end - len(self._block):
            self._blocks, self._block, self._end = iter(()), memoryview(b""), self._at
        if not self._block:
            block = next(self._blocks, b"")
            if not block:
                after = min(self._at + _FIRST, self._file.size)  # after `stop`, a single block without read-ahead
                self._blocks = self._file.blocks(self._at, stop if self._at < stop else after)
                block = next(self._blocks)
            self._block = memoryview(block)
            self._end += len(block)
        data, self._block = self._block[:most], self._block[most:]
        return data


def data_files(pattern: str, copies: Copies) -> list[Any]:
    """Returns the files that match a glob, sorted: local paths, or `RemoteFile`s if the glob is a URL.

    Raises UserError if the pattern is invalid, or the files cannot be looked up.
    """
    if "://" not in pattern:
        paths = map(Path, glob.glob(str(local_path(pattern)), recursive=True))
        return sorted(path for path in paths if path.is_file())
    path = pattern.partition("://")[2].partition("/")[2]
    if not glob.has_magic(path.partition("?")[0] if is_http(pattern) else path):
        return [_found(pattern, copies)]
    urls = _matching(pattern)
    with ThreadPoolExecutor(_TOGETHER) as pool:
        found = pool.map(lambda url: _of_info(url, urls[url], copies) or _found(url, copies), urls)
        return sorted(found, key=lambda file: file.url.split("/"))  # as pathlib sorts paths


def _matching(pattern: str) -> dict[str, Mapping[str, Any]]:
    """Returns a dict from the URL of each file that a glob matches to the server's metadata of the file. Like `glob`,
    leaves out hidden names."""
    if is_http(pattern) and "?" in pattern:
        raise UserError(f"{without_secrets(pattern)}: a glob cannot have a query; give the URL of each file")
    parts = pattern.split("/")
    plain = next(i for i, part in enumerate(parts) if i > 2 and glob.has_magic(part))
    depth = None if "**" in pattern else len(parts) - plain
    matches = re.compile(glob_translate(pattern)).fullmatch
    # A hidden name matches only a part of the pattern that also begins with a dot.
    hidden = {
        "directory": any(part.startswith(".") for part in parts[plain:-1]),
        "file": parts[-1].startswith("."),
    }
    found: dict[str, Mapping[str, Any]] = {}
    folders = [("/".join(parts[:plain]), depth)]
    while folders:
        folder, left = folders.pop()
        for url, info in _entries(folder):
            if url.rpartition("/")[2].startswith(".") and not hidden[info["type"]]:
                continue
            if info["type"] == "directory" and (left is None or left > 1):
                folders.append((url, left and left - 1))
            elif info["type"] == "file" and matches(url):
                found[url] = info
    return found


def _entries(folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (URL, metadata) of each entry in a folder."""
    system, path = system_of(f"{folder}/" if is_http(folder) else folder)
    scheme = folder.partition("://")[0]
    for info in patiently(folder, lambda: call(system, "ls", path, limit=LISTING, detail=True)):
        name = info["name"].rstrip("/")
        url = name if "://" in name else f"{scheme}://{name.lstrip('/')}"
        if url.rpartition("/")[0] == folder and url != folder:
            yield url, info


def folders_in(url: str) -> list[str]:
    """Returns the names of the folders in a folder, sorted, without hidden ones."""
    found = (one.rpartition("/")[2] for one, info in _entries(url.rstrip("/")) if info["type"] == "directory")
    return sorted(name for name in found if not name.startswith("."))


def data_file(text: str, copies: Copies) -> Any:
    """Returns the file at `text`: a local path, or a `RemoteFile`. Raises UserError if a remote file does not exist."""
    return _found(text, copies) if "://" in text else local_path(text)


def each(make: Callable[[Any], T], files: Sequence[Any]) -> list[T]:
    """Returns `make(file)` for each file. If any file is remote, makes the calls concurrently, in threads."""
    if not any(isinstance(file, RemoteFile) for file in files):
        return [make(file) for file in files]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        return list(pool.map(make, files))


def _found(url: str, copies: Copies) -> RemoteFile:
    system, path = system_of(url)
    # Without these options, the metadata from the Hugging Face hub come from a cache and lack the properties of
    # _CONTENTS.
    fresh = {"refresh": True, "expand_info": True} if url.startswith("hf://") else {}
    info = patiently(url, lambda: call(system, "info", path, **fresh))
    if info.get("type") == "directory":
        raise UserError(
            f"{without_secrets(url)} is a folder; name its files, as in {without_secrets(url).rstrip('/')}/*"
        )
    if file := _of_info(url, info, copies, marked=False):
        return file
    raise UserError(f"{without_secrets(url)}: the server does not report the size of the file; {COPY}")


def _of_info(url: str, info: Mapping[str, Any], copies: Copies, marked: bool = True) -> RemoteFile | None:
    """Returns the file that the server's metadata `info` describes; None if `info` contains no size.

    With `marked`, also returns None if `info` contains no property of _CONTENTS: the times are not used, because their
    formats in listings and in look-ups differ.
    """
    marks = {name: str(info[name]) for name in (*_CONTENTS, *_TIMES) if info.get(name)}
    unmarked = marked and marks.keys().isdisjoint(_CONTENTS)
    return None if info.get("size") is None or unmarked else RemoteFile(url, info["size"], marks, copies)

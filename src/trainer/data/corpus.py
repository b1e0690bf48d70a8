"""A corpus: documents of one kind, in any format, in one or more files."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.documents import Record, is_held_out
from trainer.data.readers import Columns, Part
from trainer.runtime.remote import RemoteFile

WHOLE_CONTENT = 256 << 20  # bytes; the fingerprint of a source up to this size reads all of it
_ENDS = 1 << 16  # bytes that the fingerprint of a larger source reads at each end of a file


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind.

    Attributes:
      name: for messages.
      parts: the sources of its records.
      fingerprint: identifies the records and their order.
      columns: the columns of a record.
      held_out: the share of records held out for evaluation; 0 if evaluation has separate documents.
      evaluates: whether this corpus is the held-out share; otherwise it is the remaining share.
    """

    name: str
    parts: tuple[Part, ...]
    fingerprint: str
    columns: Columns = ("text",)
    held_out: float = 0.0
    evaluates: bool = False

    def wants(self, record: Record) -> bool:
        """Returns whether a record of the parts belongs to the corpus."""
        return not self.held_out or is_held_out(record.key(), self.held_out) == self.evaluates

    def records(self, track: Callable[[float], None] = lambda share: None) -> Iterator[Record]:
        """Yields the records in order. Calls `track` with the share read so far."""
        total, before = sum(part.weight for part in self.parts), 0
        for part in self.parts:
            for _, share, record in part.read():
                track((before + share * part.weight) / total)
                if self.wants(record):
                    yield record
            before += part.weight

    @property
    def label(self) -> str:
        """The name, and the share of the records in this corpus."""
        if not self.held_out:
            return self.name
        return (
            f"{self.name}, {self.held_out:g} held out" if self.evaluates else f"{self.name} without {self.held_out:g}"
        )

    @property
    def identity(self) -> str:
        """The fingerprint, and the share of the records in this corpus."""
        restored = " restored" if any(part.restores for part in self.parts) else ""
        return f"{self.fingerprint} {self.columns} {self.held_out} {self.evaluates}{restored}"


def file_fingerprint(paths: Sequence[Any], also: str = "") -> str:
    """Returns the sha256, in hexadecimal, of the files' names and contents and of `also`.

    If the files have more than 256 MiB in total, only the sizes and the first and last 64 KiB of each file are read.
    Copies in other folders have the same fingerprint. Formats with an index at the end change there with every record.
    Of remote files, the address, the size and what the server tells of the content are used; if it tells nothing, the
    ends as of large files.
    """
    digest = hashlib.sha256(also.encode())
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        remote = isinstance(path, RemoteFile)
        if remote and path.content:
            digest.update(path.content.encode())
            continue
        digest.update(os.fsencode(path.name) + f"\0{size}\0".encode())
        with path.open("rb", buffering=0) as file:
            if sum(sizes) <= WHOLE_CONTENT and not remote:
                digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                digest.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read())
    return digest.hexdigest()

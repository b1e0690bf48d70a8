"""Documents of one kind, in any format and place."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.documents import Record, is_held_out
from trainer.data.readers import Columns, Part

WHOLE_CONTENT = 256 << 20  # bytes; a fingerprint reads all of a source up to this size
_ENDS = 1 << 16  # bytes that it reads of each end of a file of a larger one


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind.

    Attributes:
      name: for messages.
      parts: the sources of the records.
      fingerprint: of the records and their order.
      columns: the columns that a record has.
      held_out: the share of it that is held out for evaluation; 0 if evaluation has its own documents.
      evaluates: this is the held-out share; otherwise the rest.
    """

    name: str
    parts: tuple[Part, ...]
    fingerprint: str
    columns: Columns = ("text",)
    held_out: float = 0.0
    evaluates: bool = False

    def wants(self, record: Record) -> bool:
        """Whether a record of the parts is one of the corpus."""
        return not self.held_out or is_held_out(record.key(), self.held_out) == self.evaluates

    def records(self, track: Callable[[float], None] = lambda share: None) -> Iterator[Record]:
        """The records in order; `track` is called with the share that has been read."""
        total, before = sum(part.weight for part in self.parts), 0
        for part in self.parts:
            for _, share, record in part.read():
                track((before + share * part.weight) / total)
                if self.wants(record):
                    yield record
            before += part.weight

    @property
    def label(self) -> str:
        """The name, and which share of it."""
        if not self.held_out:
            return self.name
        return (
            f"{self.name}, {self.held_out:g} held out" if self.evaluates else f"{self.name} without {self.held_out:g}"
        )

    @property
    def identity(self) -> str:
        """The fingerprint, and which part of the records."""
        return f"{self.fingerprint} {self.columns} {self.held_out} {self.evaluates}"


def file_fingerprint(paths: Sequence[Path], also: str = "") -> str:
    """sha256, in hexadecimal, of the files' names and contents, and of `also`.

    Of files that have more than 256 MiB together it reads sizes and the first and last 64 KiB of each. So a copy at
    another place is the same data, and formats with an index change at their end with any record.
    """
    digest = hashlib.sha256(also.encode())
    sizes = [path.stat().st_size for path in paths]
    for path, size in zip(paths, sizes, strict=True):
        digest.update(os.fsencode(path.name) + f"\0{size}\0".encode())
        with path.open("rb") as file:
            if sum(sizes) <= WHOLE_CONTENT:
                digest.update(hashlib.file_digest(file, "sha256").digest())
            else:
                digest.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read())
    return digest.hexdigest()

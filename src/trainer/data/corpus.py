"""A corpus: the documents of one or more files of any format."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.data.documents import Counts, Record, is_held_out
from trainer.data.filters import Filters
from trainer.data.readers import Columns, FilePart, Part, TextPart
from trainer.runtime.remote import RemoteFile

WHOLE_CONTENT = 256 << 20  # bytes; the fingerprint of a source up to this size covers all of its content
_AHEAD = 16  # the number of remote text files that are requested in advance
_ENDS = 1 << 16  # bytes that the fingerprint of a larger source reads at each end of a file


class Piece(NamedTuple):
    """Consecutive records of a part of a corpus.

    Attributes:
      part: the index of the part.
      weight: the size of the piece's records in bytes or records, for progress.
      start, stop: the cursors at which the piece starts and stops, see `Part.read`.
      first: the fraction of the part that precedes the piece.
      share: the fraction of the part that the piece contains.
    """

    part: int
    weight: float
    start: int = 0
    stop: int | None = None
    first: float = 0.0
    share: float = 1.0

    def done(self, share: float) -> float:
        """Returns the fraction of the piece that has been read when the fraction `share` of the part has been read."""
        return min(1.0, max(0.0, (share - self.first) / self.share))


@dataclass(frozen=True)
class Corpus:
    """A source of documents, such as one component of a mixture.

    Attributes:
      name: for messages.
      parts: the sources of its records.
      fingerprint: identifies the records and their order.
      columns: the names of a record's columns.
      held_out: the share of records held out for evaluation; 0 if evaluation has separate documents.
      evaluates: whether this corpus is the held-out share; otherwise it is the remaining share.
      filters: change and drop records; None: all records are kept unchanged.
    """

    name: str
    parts: tuple[Part, ...]
    fingerprint: str
    columns: Columns = ("text",)
    held_out: float = 0.0
    evaluates: bool = False
    filters: Filters | None = None

    def taken(self, record: Record, counts: Counts) -> Record | None:
        """Applies the filters to a record of a part, and returns the result. Returns None if a filter drops the record,
        which is then counted in `counts`, or if the record is not in this corpus (`held_out` splits the records of
        `parts` into two corpora)."""
        found = self.filters.apply(record, self.columns, counts) if self.filters else record
        if found is None or (self.held_out and is_held_out(found.key(), self.held_out) != self.evaluates):
            return None
        return found

    def records(
        self,
        track: Callable[[float], None] = lambda share: None,
        pieces: "Sequence[Piece] | None" = None,
        counts: Counts | None = None,
    ) -> Iterator[Record]:
        """Yields the records in order; if `pieces` is given, only the records of these pieces. Calls `track` with the
        share read so far, and adds dropped records to `counts`."""
        if pieces is None:
            pieces = [Piece(i, part.weight) for i, part in enumerate(self.parts)]
        total, before, counts = sum(piece.weight for piece in pieces), 0.0, counts or Counts()
        for i, piece in enumerate(pieces):
            for following in pieces[i : i + _AHEAD]:
                if isinstance(part := self.parts[following.part], TextPart):
                    part.expect()
            for _, share, record in self.parts[piece.part].read(piece.start, piece.stop):
                track((before + piece.done(share) * piece.weight) / total)
                if (found := self.taken(record, counts)) is not None:
                    yield found
            before += piece.weight

    def pieces(self, size: int) -> Iterator["Piece"]:
        """Yields all pieces of the corpus in order. Parts larger than `size` bytes are cut into pieces of about that
        size where possible. With `size` 0, each piece is a whole part."""
        for i, part in enumerate(self.parts):
            weight = max(1, part.size)
            count = round(weight / size) if size else 1
            edges = [0, *(part.cuts(count) if count > 1 else ()), None]
            share = 1 / (len(edges) - 1)
            for j, (start, stop) in enumerate(itertools.pairwise(edges)):
                yield Piece(i, weight * share, start or 0, stop, j * share, share)

    @property
    def label(self) -> str:
        """The name, with the share of held-out records and whether the corpus is that share or excludes it."""
        if not self.held_out:
            return self.name
        return (
            f"{self.name}, {self.held_out:g} held out" if self.evaluates else f"{self.name} without {self.held_out:g}"
        )

    @property
    def identity(self) -> str:
        """The fingerprint, with everything else that determines the records, as text."""
        filters = f" {self.filters.identity}" if self.filters else ""
        restored = " restored" if any(part.restores for part in self.parts) else ""
        return f"{self.fingerprint} {self.columns} {self.held_out} {self.evaluates}{restored}{filters}"


def corpus_of(name: str, parts: Sequence[Any], columns: Columns, also: str = "") -> Corpus:
    """Returns the corpus of `parts`. `also`: text that is included in the fingerprint, see `file_fingerprint`."""
    paths = [part.path for part in parts if isinstance(part, FilePart)]
    return Corpus(name, tuple(parts), file_fingerprint(paths, also), columns)


def file_fingerprint(paths: Sequence[Any], also: str = "") -> str:
    """Returns the sha256, in hexadecimal, of the files' names and contents and of `also`.

    If the files have more than 256 MiB in total, only the sizes and the first and last 64 KiB of each file are read.
    This detects a change of any record in formats that end with an index of their records. Copies in other folders have
    the same fingerprint. For a remote file, `RemoteFile.content` replaces name and content; if it is empty, the file is
    read as if the total were above 256 MiB.
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
                digest.update(file.read(_ENDS))
    return digest.hexdigest()

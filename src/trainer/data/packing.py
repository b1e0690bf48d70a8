"""Packs documents into rows of equal length, one row at a time. The same generators prepare and stream rows.

A document t0..tn, including its special tokens, becomes the inputs [t0, .., tn-1] with the targets [t1, .., tn]. It is
shifted before it is packed, so no target belongs to another document. Segment ids start at 1 in each row. After its
last segment, a row is padded with zeros. If a document continues in another row, the rest is a separate segment there.
Aligned segments also have padding between them. A document that others must follow (`Document.after`) is not split.

Each row comes with the point from which to resume after it, `Resume(mark, skip, rows)`. To resume, start with the
document that came with `mark`, without its first `skip` pairs, and drop the first `rows` of the resulting rows, which
have already been returned. The third value lists the origin of each segment of the row.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trainer.data.documents import Counts, Document

PackedRow = dict[str, np.ndarray]
GROUP = 64  # the number of rows that first_fit and best_fit fill at a time


class Resume(NamedTuple):
    """The point from which to resume packing; see the module docstring."""

    mark: Any
    skip: int
    rows: int


class Origin(NamedTuple):
    """The beginning of a segment: pair `start` of the document that came with `mark`, or, if `after` is not 0, of the
    `after`-th document in its `Document.after`."""

    mark: Any
    start: int
    after: int = 0


class Packed(NamedTuple):
    """A row with what the module docstring describes."""

    row: PackedRow
    resume: Resume
    origins: list[Origin]


@dataclass(frozen=True)
class Packing:
    """How documents share rows of `length` tokens.

    The fields are keys of the configuration, except `align`: every segment begins at a multiple of this many tokens,
    which divides `length`.
    """

    length: int
    kind: str = "concat_then_split"  # or first_fit, best_fit
    together: bool = True  # whether a row may have several documents
    max_segments: int = -1
    truncate: bool = False
    align: int = 1

    def __post_init__(self) -> None:
        assert self.length % self.align == 0, "the end of a row is a place where a segment may begin"

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON-compatible value, equal for packings that make equal rows of equal documents. It contains every field,
        but `align` only if it is not 1, so that rows prepared before `align` existed stay valid."""
        found = {name: value for name, value in asdict(self).items() if (name, value) != ("align", 1)}
        if self._concatenates and self.max_segments > 0:
            found["kind"] += ", bounded"  # earlier versions ignored max_segments
        return found

    def rows(self, documents: Iterable[tuple[Any, Document]], counts: Counts, skip: int = 0) -> Iterator[Packed]:
        """Yields the rows of `documents`, which are pairs of a mark and a document. Omits the first `skip` pairs of the
        first document."""
        documents = self._counted(documents, counts)
        if self._concatenates:
            return _concat(documents, self, counts, skip)
        return _fit(documents, self, counts, skip)

    @property
    def _concatenates(self) -> bool:
        return self.together and self.kind == "concat_then_split"

    def _counted(self, documents: Iterable[tuple[Any, Document]], counts: Counts) -> Iterator[tuple[Any, Document]]:
        """Yields `documents`, and counts documents without a loss-bearing token in any row."""
        kept = self.length if self.truncate and not self._concatenates else None
        for mark, document in documents:
            if document.loss is not None and not document.loss[:kept].any():
                counts.without_loss += 1
                counts.longest = max(counts.longest, len(document.tokens) if document.loss.any() else 0)
            yield mark, document


@dataclass
class _Row:
    length: int
    align: int
    fill: int = 0  # the beginning of the next segment
    segments: int = 0
    documents: int = 0
    arrays: PackedRow = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrays = {name: np.zeros(self.length, np.int32) for name in ("inputs", "targets", "segmentation", "loss")}

    def add(self, mark: Any, document: Document, start: int, stop: int) -> None:
        """Appends pairs [start, stop) of a document as a new segment, and the documents in `after`."""
        self.documents += 1
        self._append(document, start, stop)
        self.origins.append(Origin(mark, start))
        for i, behind in enumerate(document.after, 1):
            self._append(behind, 0, behind.pairs)
            self.origins.append(Origin(mark, 0, i))

    def _append(self, document: Document, start: int, stop: int) -> None:
        here = slice(self.fill, self.fill + stop - start)
        self.segments += 1
        self.arrays["inputs"][here] = document.tokens[start:stop]
        self.arrays["targets"][here] = document.tokens[start + 1 : stop + 1]
        self.arrays["segmentation"][here] = self.segments
        self.arrays["loss"][here] = 1 if document.loss is None else document.loss[start:stop]
        self.fill = here.stop + -here.stop % self.align


def _concat(documents: Iterable[tuple[Any, Document]], packing: Packing, counts: Counts, skip: int) -> Iterator[Packed]:
    """Concatenates documents and splits them into rows. A row with the maximum number of segments ends there."""
    length = packing.length
    row = _Row(length, packing.align)
    for mark, document in documents:
        assert not document.after, "it would be split"
        start, skip, pairs = skip, 0, document.pairs
        while start < pairs:
            stop = min(pairs, start + length - row.fill)
            row.add(mark, document, start, stop)
            if stop < pairs:
                counts.split += start == 0
            start = stop
            if row.fill == length or row.segments == packing.max_segments:
                yield Packed(row.arrays, Resume(mark, start, 0), row.origins)
                row = _Row(length, packing.align)
    if row.fill:
        yield Packed(row.arrays, Resume(None, 0, 0), row.origins)


def _fit(documents: Iterable[tuple[Any, Document]], packing: Packing, counts: Counts, skip: int) -> Iterator[Packed]:
    """Packs each piece of a document, unsplit, into a row of a group: the first row with enough space (first_fit) or
    the fullest one with enough space (best_fit). A piece that fits into no row of the group ends the group."""
    length = packing.length
    group: list[_Row] = []
    begin = Resume(None, 0, 0)
    limit, size = (packing.max_segments, GROUP) if packing.together else (1, 1)
    choose: Callable[[list[_Row]], _Row] = (lambda rows: rows[0]) if packing.kind != "best_fit" else _fullest
    for mark, document in documents:
        start, skip = skip, 0
        pairs = document.pairs
        if pairs > length and packing.truncate:
            counts.cut += 1
            counts.cut_tokens += pairs - length
            pairs = length
        counts.split += start == 0 and pairs > length
        for piece in range(start, pairs, length):
            stop = min(piece + length, pairs)
            places = document.places(packing.align) if document.after else stop - piece
            assert places <= length, "it would be split"
            room = [row for row in group if row.fill + places <= length and row.documents != limit]
            if not room and len(group) == size:
                after = Resume(mark, piece, 0)
                yield from _given(group, begin, after)
                group, begin = [], after
            if not room:
                begin = begin if group else Resume(mark, piece, 0)
                group.append(_Row(length, packing.align))
                room = group[-1:]
            choose(room).add(mark, document, piece, stop)
    yield from _given(group, begin, Resume(None, 0, 0))


def _fullest(rows: list[_Row]) -> _Row:
    return max(rows, key=lambda row: row.fill)


def _given(group: list[_Row], begin: Resume, after: Resume) -> Iterator[Packed]:
    for i, row in enumerate(group, 1):
        yield Packed(row.arrays, after if i == len(group) else begin._replace(rows=i), row.origins)

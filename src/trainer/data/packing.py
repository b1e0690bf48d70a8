"""Packs documents into rows of equal length, one row at a time, for prepared and streamed data alike.

A document t0..tn, including its special tokens, becomes the inputs [t0, .., tn-1] with the targets [t1, .., tn]. It is
shifted before it is packed, so no target belongs to another document. Segment ids start at 1 in each row. After its
last segment, a row is padded with zeros. If a document continues in another row, the rest is a separate segment there.
If segments are aligned (`Packing.align`), there may be padding between them, too. A document that other documents must
directly follow (`Document.after`) is not split.

Each document comes with a mark, a value that identifies the location from which the document was read. Each row is
yielded as a `Packed`, which also contains the point from which to resume after the row, `Resume(mark, skip, rows)`. To
resume, start with the document of `mark`, omit its first `skip` pairs of an input and a target, and drop the first
`rows` resulting rows, which have already been returned.
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
    """The origin of a segment. The segment's first input and target are the pair with index `start` of a document.

    If `after` is 0, this document is the document of `mark`. Otherwise, it is the `after`-th document (counted from 1)
    in the `Document.after` of the document of `mark`.
    """

    mark: Any
    start: int
    after: int = 0


class Packed(NamedTuple):
    """A row, the point from which to resume after it, and the origin of each of its segments."""

    row: PackedRow
    resume: Resume
    origins: list[Origin]


@dataclass(frozen=True)
class Packing:
    """How documents share rows of `length` tokens.

    The first five fields are the values of max_target_length, grain_packing_type, packing, max_segments_per_seq and
    use_truncation. Every segment begins at a multiple of `align` tokens, and `length` must be a multiple of `align`.
    """

    length: int
    kind: str = "concat_then_split"  # alternatives: first_fit, best_fit
    together: bool = True  # whether a row may have several documents
    max_segments: int = -1
    truncate: bool = False
    align: int = 1

    def __post_init__(self) -> None:
        assert self.length % self.align == 0, "length must be a multiple of align"

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON-compatible value that is equal for packings that make equal rows from equal documents. It contains
        every field, but omits `align` if that is 1, so that rows prepared before `align` existed stay valid."""
        found = {name: value for name, value in asdict(self).items() if (name, value) != ("align", 1)}
        if self._concatenates and self.max_segments > 0:
            found["kind"] += ", bounded"  # earlier versions ignored max_segments, so their rows differ
        return found

    def rows(self, documents: Iterable[tuple[Any, Document]], counts: Counts, skip: int = 0) -> Iterator[Packed]:
        """Yields the rows that are made from `documents`, tuples of a mark and its document. Omits the first `skip`
        pairs of an input and a target in the first document."""
        documents = self._counted(documents, counts)
        if self._concatenates:
            return _concat(documents, self, counts, skip)
        return _fit(documents, self, counts, skip)

    @property
    def _concatenates(self) -> bool:
        return self.together and self.kind == "concat_then_split"

    def _counted(self, documents: Iterable[tuple[Any, Document]], counts: Counts) -> Iterator[tuple[Any, Document]]:
        """Yields `documents` unchanged. Adds to `counts` those in which, after truncation, no token contributes to the
        loss."""
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
        """Appends the pairs [start, stop) of `document` as a new segment, and each document in `document.after` as a
        further segment."""
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
    """Concatenates documents and splits them into rows. A row also ends at the maximum number of segments."""
    length = packing.length
    row = _Row(length, packing.align)
    for mark, document in documents:
        assert not document.after, "concatenation would split a document with followers"
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
    """Divides each document into pieces of at most one row's length, and packs each piece, unsplit, into a row of the
    current group: the first row with enough space (first_fit) or the fullest such row (best_fit). A piece that fits
    into no row starts a new row; if the group has its maximum number of rows, the new row starts a new group."""
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
            assert places <= length, "a document with followers is longer than a row"
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

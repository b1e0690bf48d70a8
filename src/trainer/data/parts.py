"""Tokenizes and packs the parts of a corpus, in this process or in several processes.

A row contains only documents of one part, so the rows depend neither on the number of processes nor on which process
handles which part.
"""

import functools
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import UserError
from trainer.data import beam, cache, workers
from trainer.data.bar import Bar
from trainer.data.corpus import Corpus, Piece
from trainer.data.documents import Counts, Document, Encoder, Record
from trainer.data.duplicates import has_hashes, merge, surviving, write_hashes
from trainer.data.packing import Packed, Packing
from trainer.data.rows import write

_CHUNK = 64  # the number of documents to encode at once
Part = Sequence[tuple[int, Piece]]  # pieces of corpora, each with the index of its corpus


@dataclass(frozen=True)
class Work:
    """What to prepare and how: the corpora and their division into parts, the encoder and the packing that make rows
    from the documents, and the output folder."""

    corpora: Sequence[Corpus]
    encoder: Encoder
    packing: Packing
    parts: Sequence[Part]
    folder: Path

    @property
    def drops_duplicates(self) -> bool:
        """Whether only the first of equal records is kept."""
        return any(corpus.filters and corpus.filters.duplicates for corpus in self.corpora)

    @property
    def duplicates(self) -> Path:
        """The temporary folder for finding duplicates."""
        return self.folder / "duplicates"

    def place(self, i: int) -> Path:
        """Returns the folder of part `i`: `folder` itself if there is only one part."""
        return self.folder / f"part-{i:05}" if len(self.parts) > 1 else self.folder


class Cut(NamedTuple):
    """How the preparation is divided into parts and processes.

    Attributes:
      size: the approximate size of a part, in bytes of the data files; 0: one part.
      workers: the maximum number of processes; 0: one for each core.
      beam: the options with which Apache Beam runs the preparation; None: Beam is not used.
    """

    size: int = 0
    workers: int = 1
    beam: str | None = None


class Totals(NamedTuple):
    """Totals over rows.

    Attributes:
      rows: the number of rows.
      tokens: the number of targets that contribute to the loss.
      pairs: the number of positions that are not padding.
      target_bytes: the number of text bytes of the targets that contribute to the loss; 0 without a tokenizer that has
        `bytes_per_token`.
    """

    rows: int = 0
    tokens: int = 0
    pairs: int = 0
    target_bytes: int = 0


class Written(NamedTuple):
    """A description of written rows: their totals, the counts of the documents, and `names`, the result of
    `rows.write`."""

    totals: Totals
    counts: Counts
    names: list[tuple[str, str]]

    @classmethod
    def read(cls, meta: dict[str, Any]) -> "Written":
        """Converts `meta`, a dict that `as_dict` returned, back to a `Written`."""
        counts = meta["counts"] | {"noticed": {kind: tuple(found) for kind, found in meta["counts"]["noticed"].items()}}
        return cls(Totals(**meta["totals"]), Counts(**counts), [*map(tuple, meta["names"])])

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a JSON-compatible dict; `read` is the inverse."""
        return {"totals": self.totals._asdict(), "counts": asdict(self.counts), "names": self.names}


def total(written: Sequence[Written], noun: str) -> tuple[Totals, Counts]:
    """Returns the sums of the totals and counts of all parts. `noun`: the word for a record in messages."""
    counts = Counts(noun=noun)
    for part in written:
        counts.add(part.counts)
    return Totals(*map(sum, zip(*(part.totals for part in written), strict=True))), counts


def parts_of(corpora: Sequence[Corpus], size: int) -> list[Part]:
    """Divides corpora into parts. A part consists of consecutive pieces of about `size` bytes in total, or more if one
    piece is larger; if `size` is 0, there is one part."""
    parts: list[list[tuple[int, Piece]]] = [[]]
    total = 0.0
    for i, corpus in enumerate(corpora):
        for piece in corpus.pieces(size):
            if size and parts[-1] and total + piece.weight > size:
                parts.append([])
                total = 0.0
            parts[-1].append((i, piece))
            total += piece.weight
    return [*parts]


def records_of(
    corpora: Sequence[Corpus], part: Part, counts: Counts, track: Callable[[float], None]
) -> Iterator[Record]:
    """Yields the records of a part in order. Calls `track` with the share of the part that has been read, and counts
    the dropped records in `counts`."""
    groups = [(i, [piece for _, piece in group]) for i, group in itertools.groupby(part, lambda pair: pair[0])]
    for done, (i, pieces) in enumerate(groups):
        yield from corpora[i].records(lambda share, done=done: track((done + share) / len(groups)), pieces, counts)


def documents_of(
    corpora: Sequence[Corpus],
    encoder: Encoder,
    counts: Counts,
    track: Callable[[float], None] = lambda share: None,
    part: Part | None = None,
    kept: Callable[[Iterator[Record]], Iterator[Record]] = lambda records: records,
) -> Iterator[tuple[Any, Document]]:
    """Yields the documents of `part` (None: of all corpora) in order, each with the location of its record.

    Encodes one chunk of records at a time, and then calls `track` with the share of the part that has been read. `kept`
    is a function that gets the records and yields those that are to be encoded.
    """
    (part,) = [part] if part is not None else parts_of(corpora, 0)
    read = [0.0]
    records = kept(records_of(corpora, part, counts, lambda share: read.__setitem__(0, share)))
    while chunk := list(itertools.islice(records, _CHUNK)):
        for record, document in zip(chunk, encoder.encode(chunk, counts), strict=True):
            if document is not None:
                yield record.where, document
        track(*read)


def write_parts(work: Work, cut: Cut, label: str, say: Callable[[str], None]) -> list[Written]:
    """Writes the rows of all parts. Parts that an earlier call finished are reused.

    Args:
      label: the name of the data in progress messages.
      say: called with each progress message.

    Raises:
      UserError: a record cannot be encoded, or a process died.
      OSError: the disk is full.
    """
    every = range(len(work.parts))
    if work.drops_duplicates:
        work.duplicates.mkdir(exist_ok=True)
        hashed = [i for i in every if has_hashes(work.duplicates, i)]
        with Bar(say, f"duplicates in {label}") as bar:
            _each(_hash, work, hashed, cut, bar)
            merge(work.duplicates, len(work.parts))
    with Bar(say, label) as bar:
        if len(work.parts) == 1:
            written = [_write_part(work, 0, work.folder, bar)]
        else:
            done = [i for i in every if _is_finished(work.place(i))]
            _each(_commit, work, done, cut, bar)
            written = [Written.read(cache.read_meta(work.place(i), verify=False)) for i in every]
            for leftover in work.folder.glob("part-*.tmp"):
                shutil.rmtree(leftover)
    shutil.rmtree(work.duplicates, ignore_errors=True)
    return written


Task = Callable[[Work, int, Callable[[float], None]], None]


def _each(task: Task, work: Work, done: Sequence[int], cut: Cut, bar: Bar) -> None:
    """Calls `task` for each part that is not in `done`."""
    sizes = np.array([sum(piece.weight for _, piece in part) for part in work.parts])
    sizes /= sizes.sum()
    shares = np.zeros(len(sizes))
    shares[[*done]] = 1.0
    left = sorted({*range(len(sizes))} - {*done})
    bar.start(float(shares @ sizes))

    def progress(i: int, share: float) -> None:
        shares[i] = share
        bar(float(shares @ sizes))

    called, count = functools.partial(task, work), min(cut.workers or workers.cores(), len(left))
    if cut.beam is not None and left:
        beam.run(functools.partial(_without_progress, called), left, cut.beam, work.folder)
    elif count > 1 and workers.possible():
        workers.run(called, left, count, progress)
    else:
        for i in left:
            called(i, functools.partial(progress, i))


def _without_progress(called: workers.Task, i: int) -> None:
    called(i, lambda share: None)


def _is_finished(folder: Path) -> bool:
    """Returns whether an earlier call completed the folder of a part. Removes the folder if it is damaged."""
    if not folder.exists():
        return False
    try:
        cache.read_meta(folder)
    except UserError:
        shutil.rmtree(folder)
        return False
    return True


def _hash(work: Work, i: int, track: Callable[[float], None]) -> None:
    write_hashes(work.duplicates, i, records_of(work.corpora, work.parts[i], Counts(), track))


def _commit(work: Work, i: int, track: Callable[[float], None]) -> None:
    """Writes a part into a temporary folder, and renames the folder when it is complete. Discards the folder if another
    process has completed the part first."""
    folder = work.place(i)
    temporary = folder.with_name(f"{folder.name}.{platform.node()}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        cache.commit(temporary, folder, _write_part(work, i, temporary, track).as_dict())
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(temporary)


def _write_part(work: Work, i: int, folder: Path, track: Callable[[float], None]) -> Written:
    encoder, packing = work.encoder, work.packing
    counts, totals = Counts(noun=encoder.noun), Totals()
    lengths = encoder.tokenizer.bytes_per_token if encoder.tokenizer else None

    def summed(rows: Iterable[Packed]) -> Iterator[Packed]:
        nonlocal totals
        for packed in rows:
            row = packed.row
            targets = row["targets"][row["loss"] != 0]
            more = 1, len(targets), int(np.count_nonzero(row["segmentation"])), 0
            if lengths is not None:
                more = *more[:3], int(lengths[targets].sum())
            totals = Totals(*map(sum, zip(totals, more, strict=True)))
            yield packed

    def kept(records: Iterator[Record]) -> Iterator[Record]:
        for record, survives in surviving(work.duplicates, i, records):
            if survives:
                yield record
            else:
                counts.notice(
                    "duplicates",
                    lambda: f"{counts.what} are dropped as duplicates; the first: {record.where}",  # noqa: B023
                )

    keep: Any = {"kept": kept} if work.drops_duplicates else {}
    documents = documents_of(work.corpora, encoder, counts, track, work.parts[i], **keep)
    rows = summed(packing.rows(documents, counts))
    names: list[tuple[str, str]] = []
    if (first := next(rows, None)) is not None:
        every = itertools.chain([first], rows)
        names = write(folder, every, length=packing.length, vocab_size=encoder.limit, masked=encoder.masked)
    if encoder.whole and lengths is not None and not counts.cut:
        assert totals.target_bytes == counts.bytes, f"targets are {totals.target_bytes} bytes of {counts.bytes}"
    return Written(totals, counts, names)

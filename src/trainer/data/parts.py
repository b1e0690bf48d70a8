"""Tokenizes and packs the parts of a corpus, in this process or in several.

Documents are packed within their part only, so the rows depend neither on the number of processes nor on their order.
"""

import functools
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import UserError
from trainer.data import cache
from trainer.data.bar import Bar
from trainer.data.corpus import Corpus, Piece
from trainer.data.documents import Counts, Document, Encoder, Record
from trainer.data.duplicates import has_hashes, merge, surviving, write_hashes
from trainer.data.packing import Packed, Packing
from trainer.data.rows import write
from trainer.runtime.signals import die_with

_CHUNK = 64  # documents to encode at once
_LOOK = 0.5  # seconds between two looks at the progress of other processes
Part = Sequence[tuple[int, Piece]]  # pieces of corpora, each with the index of its corpus


@dataclass(frozen=True)
class Work:
    """What the rows of all parts are made of, and the folder in which each part gets a folder."""

    corpora: Sequence[Corpus]
    encoder: Encoder
    packing: Packing
    parts: Sequence[Part]
    folder: Path

    @property
    def drops_duplicates(self) -> bool:
        """Whether of equal records only the first is kept."""
        return any(corpus.filters and corpus.filters.duplicates for corpus in self.corpora)

    @property
    def duplicates(self) -> Path:
        """The folder of the search for duplicates."""
        return self.folder / "duplicates"

    def place(self, i: int) -> Path:
        """Returns the folder of part `i`: `folder` itself if there is only one."""
        return self.folder / f"part-{i:05}" if len(self.parts) > 1 else self.folder


class Totals(NamedTuple):
    """The totals of some rows.

    Attributes:
      rows: their number.
      tokens: targets that bear loss.
      pairs: positions that are not padding.
      target_bytes: bytes of the text of targets that bear loss; 0 if the tokenizer does not define them.
    """

    rows: int = 0
    tokens: int = 0
    pairs: int = 0
    target_bytes: int = 0


class Written(NamedTuple):
    """The totals and counts of some rows, and the files to which their segments refer (see `rows.write`)."""

    totals: Totals
    counts: Counts
    names: list[tuple[str, str]]

    @classmethod
    def read(cls, meta: dict[str, Any]) -> "Written":
        """Returns the object of which `as_dict` returned `meta`."""
        counts = meta["counts"] | {"noticed": {kind: tuple(found) for kind, found in meta["counts"]["noticed"].items()}}
        return cls(Totals(**meta["totals"]), Counts(**counts), [*map(tuple, meta["names"])])

    def as_dict(self) -> dict[str, Any]:
        """Returns a JSON-compatible dict."""
        return {"totals": self.totals._asdict(), "counts": asdict(self.counts), "names": self.names}


def total(written: Sequence[Written], noun: str) -> tuple[Totals, Counts]:
    """Returns the sums of the totals and counts of all parts. `noun`: see `Counts`."""
    counts = Counts(noun=noun)
    for part in written:
        counts.add(part.counts)
    return Totals(*map(sum, zip(*(part.totals for part in written), strict=True))), counts


def parts_of(corpora: Sequence[Corpus], size: int) -> list[Part]:
    """Returns the parts of some corpora, each of about `size` bytes; one part if `size` is 0."""
    groups = [[(i, piece) for piece in group] for i, corpus in enumerate(corpora) for group in corpus.pieces(size)]
    return [*groups] if size else [[*itertools.chain.from_iterable(groups)]]


def records_of(
    corpora: Sequence[Corpus], part: Part, counts: Counts, track: Callable[[float], None]
) -> Iterator[Record]:
    """Yields the records of a part in order. `track` gets the share read so far, and `counts` the dropped records."""
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
    """Yields the documents of a part, by default of all corpora, in order, each with the place of its record. Encodes
    one chunk at a time. `track` gets the share read so far; `kept` returns the records to encode."""
    (part,) = [part] if part is not None else parts_of(corpora, 0)
    records = kept(records_of(corpora, part, counts, track))
    while chunk := list(itertools.islice(records, _CHUNK)):
        for record, document in zip(chunk, encoder.encode(chunk, counts), strict=True):
            if document is not None:
                yield record.where, document


def write_parts(work: Work, workers: int, label: str, say: Callable[[str], None]) -> list[Written]:
    """Writes the rows of all parts. Parts that an earlier call finished are kept.

    Args:
      workers: the most processes to use.
      label: the name of the data, for progress; `say` gets lines of progress.

    Raises:
      UserError: a record cannot be encoded, or a process died. OSError: the disk is full.
    """
    every = range(len(work.parts))
    if work.drops_duplicates:
        work.duplicates.mkdir(exist_ok=True)
        hashed = [i for i in every if has_hashes(work.duplicates, i)]
        with Bar(say, f"duplicates in {label}") as bar:
            _each(_hash, work, hashed, workers, bar)
            merge(work.duplicates, len(work.parts))
    with Bar(say, label) as bar:
        if len(work.parts) == 1:
            written = [_write_part(work, 0, work.folder, bar)]
        else:
            done = {i: found for i in every if (found := _finished(work.place(i)))}
            done |= _each(_commit, work, [*done], workers, bar)
            written = [Written.read(done[i]) for i in every]
    shutil.rmtree(work.duplicates, ignore_errors=True)
    return written


Task = Callable[[Work, int, Callable[[float], None]], dict[str, Any]]


def _each(task: Task, work: Work, done: Sequence[int], workers: int, bar: Bar) -> dict[int, dict[str, Any]]:
    """Calls `task` for each part that is not in `done`, in up to `workers` processes. Returns the results."""
    sizes = np.array([sum(piece.weight for _, piece in part) for part in work.parts])
    shares = np.zeros(len(sizes))
    shares[[*done]] = 1.0
    left = [i for i in range(len(sizes)) if i not in {*done}]
    bar.start(float(shares @ sizes / sizes.sum()))

    def progress(i: int, share: float) -> None:
        shares[i] = share
        bar(float(shares @ sizes / sizes.sum()))

    if min(workers, len(left)) > 1:
        return _in_processes(task, work, left, min(workers, len(left)), progress)
    return {i: task(work, i, functools.partial(progress, i)) for i in left}


def _in_processes(
    task: Task, work: Work, left: Sequence[int], workers: int, progress: Callable[[int, float], None]
) -> dict[int, dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(work.parts), lock=False)
    others = {*multiprocessing.active_children()}
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (work, shares, os.getpid()))
    pending = {pool.submit(_in_worker, task, i): i for i in left}
    done: dict[int, dict[str, Any]] = {}
    try:
        while pending:
            ended, _ = wait(pending, _LOOK, FIRST_COMPLETED)
            for future in ended:
                i = pending.pop(future)
                done[i] = future.result()
            for i in left:
                progress(i, 1.0 if i in done else shares[i])
    except BrokenProcessPool as error:
        raise cache.Unfinished(
            "a process that prepares data died, perhaps because the memory is full: set a smaller prepare_workers; the "
            "same command continues with the remaining parts"
        ) from error
    finally:
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()  # a part may take minutes, and the next run makes it again
        pool.shutdown(cancel_futures=True)
    return done


_WORK: list[Any] = []  # in a worker: the work, and the share of each part that is done


def _begin_worker(work: Work, shares: Any, parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _WORK[:] = work, shares


def _in_worker(task: Task, i: int) -> dict[str, Any]:
    work, shares = _WORK

    def track(share: float) -> None:
        shares[i] = share

    try:
        return task(work, i, track)
    except UserError as error:
        raise UserError(str(error)) from None  # some subclasses cannot be pickled


def _finished(folder: Path) -> dict[str, Any] | None:
    """Returns what an earlier call wrote into the folder of a part; None if it is not there or damaged."""
    if not folder.exists():
        return None
    try:
        return cache.read_meta(folder)
    except UserError:
        shutil.rmtree(folder)
        return None


def _hash(work: Work, i: int, track: Callable[[float], None]) -> dict[str, Any]:
    write_hashes(work.duplicates, i, records_of(work.corpora, work.parts[i], Counts(), track))
    return {}


def _commit(work: Work, i: int, track: Callable[[float], None]) -> dict[str, Any]:
    """Writes a part into a new folder, which gets its name when it is complete. Returns `Written.as_dict`."""
    folder = work.place(i)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    written = _write_part(work, i, temporary, track).as_dict()
    cache.commit(temporary, folder, written)
    return written


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
                    lambda: f"{counts.what} are dropped, because an equal one comes before; the first: {record.where}",  # noqa: B023
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

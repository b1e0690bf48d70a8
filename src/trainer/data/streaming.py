"""data_pipeline=streaming: grain pipelines read, shuffle, tokenize and pack records while training runs.

Import this module only where it is used, because it imports grain.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from trainer.config.errors import UserError
from trainer.data.corpus import Corpus
from trainer.data.documents import Counts, Document, Encoder, Record
from trainer.data.order import permuted
from trainer.data.packing import Packing, Resume
from trainer.data.readers import IndexedPart, Part, indexed

_OPEN_FILES = 8  # the maximum number of files read alternately if the order is shuffled
_WINDOWS = 1 << 32  # added to the seed of the files' order, to give the seed for shuffling within windows
_BUFFER = 4  # the number of rows that a worker process prefetches
_PASSES = 2  # a process that has found no document after this many passes over its records raises an error


def streamed_rows(
    corpora: Sequence[Corpus],
    weights: Sequence[int],
    encoder: Encoder,
    packing: Packing,
    *,
    seed: int | None,
    window: int,
    workers: int,
    process_index: int,
    process_count: int,
) -> Any:
    """Returns an endless grain.IterDataset of this process's rows. Each row is a dict of arrays [length], with one more
    entry, `counts`: the `Counts` since the previous row.

    If the records can be read by index, they are shuffled globally, and each of n processes gets every n-th record.
    Otherwise, the order of the files is shuffled, and records are shuffled within windows of `window` records. In that
    case, the files are divided among the processes if there are at least n files; with fewer files, each process gets
    every n-th record. If `seed` is None, nothing is shuffled.
    """
    parts = []
    for corpus in corpora:
        records, pass_of = _records(corpus, seed, window, workers, process_index, process_count)
        packed = functools.partial(_Packed, pass_of=pass_of, corpus=corpus, encoder=encoder, packing=packing)
        parts.append(_Through(records, packed))
    rows: Any = parts[0] if len(parts) == 1 else grain.IterDataset.mix(parts, list(map(float, weights)))
    if workers:
        # grain reads absl's flags, which fails until they are parsed or marked as parsed.
        from absl import flags

        flags.FLAGS.mark_as_parsed()
        rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=_BUFFER))
    return rows


def _records(
    corpus: Corpus, seed: int | None, window: int, workers: int, process_index: int, process_count: int
) -> tuple[Any, Callable[[Any], int]]:
    """Returns this process's share of the records, and a function that converts the state of the share's iterator to
    the number of its current pass over the share."""
    if indexed(corpus.parts):
        every = _Concatenated(corpus.parts)  # type: ignore[arg-type]
        records = grain.MapDataset.source(every)
        if seed is not None:
            records = records.shuffle(seed)
        mine = records.repeat()[process_index::process_count]
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        # With shuffling, a process gets a different share in each epoch and therefore reads every document eventually.
        # It makes no passes over a fixed share, so the number of the pass stays 0. Without shuffling, a worker gets
        # every `stride`-th record of the repeated data, a sequence that repeats after `share` records.
        stride = process_count * max(1, workers)
        share = None if seed is not None else len(every) // math.gcd(len(every), stride)
        return mine.to_iter_dataset(options), functools.partial(_pass_of_index, share)
    files = _Files(corpus.parts, seed, [(process_index, process_count)])
    return _Through(files, functools.partial(_Shuffled, seed=seed, window=window)), _pass_of_files


def _pass_of_index(share: int | None, state: Any) -> int:
    return 0 if share is None else state["next_index"] // share


def _pass_of_files(state: Any) -> int:
    return state["files"]["epoch"]


class _Concatenated:
    """The concatenated records of several parts."""

    def __init__(self, parts: Sequence[IndexedPart]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Record:
        i = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[i][int(index - (self._ends[i - 1] if i else 0))]


class _Files(grain.IterDataset):
    """The records of files. Each epoch reads the files from the beginning, in shuffled order if there is a seed.

    `shares` contains one or two pairs (index, count). The first pair selects the process's share, share `index` of
    `count`, and the second pair selects the worker's share of the process's share. The pairs are applied in order. A
    pair divides the files if at least `count` files are left; otherwise, this pair and the following one divide the
    records.
    """

    def __init__(self, parts: Sequence[Part], seed: int | None, shares: list[tuple[int, int]]):
        super().__init__()
        self._parts, self._seed, self._shares = parts, seed, shares

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Sets the share of a worker process. grain calls this method in the worker."""
        self._shares = [*self._shares, (sl.start, sl.step)]

    def __iter__(self) -> "_FilesIterator":
        parts, index, count = list(self._parts), 0, 1
        for i, n in self._shares:
            if count == 1 and len(parts) >= n:
                parts = parts[i::n]
            else:
                index, count = index + i * count, count * n
        return _FilesIterator(parts, self._seed, index, count)


class _FilesIterator(grain.DatasetIterator):
    """Yields (epoch, record). With a seed, it takes one record alternately from each of up to _OPEN_FILES files;
    without a seed, it reads the files one by one. It reads all files of an epoch to their end before it opens files of
    the next epoch.

    The state lists the open files and the position in each: [number in the endless order of files, cursor, records
    read].
    """

    def __init__(self, parts: Sequence[Part], seed: int | None, index: int, count: int):
        super().__init__()
        self._parts, self._seed, self._index, self._count = parts, seed, index, count
        width = 1 if seed is None else min(_OPEN_FILES, len(parts))
        self._open: list[list[int] | None] = [None] * width
        self._readers: list[Iterator[tuple[int, float, Record]]] = [iter(())] * width
        self._next = self._turn = 0

    def __next__(self) -> tuple[int, Record]:
        ended = 0
        while True:
            opened = self._open[self._turn]
            if opened is None and self._next % len(self._parts) == 0 and any(self._open):
                self._turn = (self._turn + 1) % len(self._open)
                continue
            if opened is None:
                opened = self._open[self._turn] = [self._next, 0, 0]
                self._readers[self._turn] = self._part(self._next).read()
                self._next += 1
            following = next(self._readers[self._turn], None)
            if following is None:
                self._open[self._turn] = None
                ended += 1
                if ended > 2 * len(self._parts) + len(self._open):
                    raise UserError(
                        f"{self._parts[0].name} and the other files hold too few records for every process and "
                        "worker to get one; use fewer processes or workers, or data_pipeline=prepared"
                    )
                continue
            opened[1], _, record = following
            opened[2] += 1
            if (opened[2] - 1) % self._count == self._index:
                self._turn = (self._turn + 1) % len(self._open)
                return opened[0] // len(self._parts), record

    def _part(self, number: int) -> Part:
        epoch, i = divmod(number, len(self._parts))
        if self._seed is not None:
            (i,) = permuted(np.array([i]), len(self._parts), seed=self._seed, epoch=epoch)
        return self._parts[i]

    def get_state(self) -> dict[str, Any]:
        open_files, epoch = [opened and list(opened) for opened in self._open], self._next // len(self._parts)
        return {"open": open_files, "next": self._next, "turn": self._turn, "epoch": epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        self._open = [opened and list(opened) for opened in state["open"]]
        self._readers = [iter(()) if opened is None else self._part(opened[0]).read(opened[1]) for opened in self._open]
        self._next, self._turn = state["next"], state["turn"]


class _Through(grain.IterDataset):
    """A data set whose iterator is the result of `make` for the iterator of `parent`."""

    def __init__(self, parent: grain.IterDataset, make: Callable[[grain.DatasetIterator], grain.DatasetIterator]):
        super().__init__(parent)
        self._make = make

    def __iter__(self) -> grain.DatasetIterator:
        return self._make(self._parent.__iter__())


class _Shuffled(grain.DatasetIterator):
    """Shuffles the records of one window at a time. A window has `window` records, or fewer at the end of an epoch.
    Without a seed, keeps the order.

    `get_state` returns the state of the files at the start of the current window, the window's number, and the number
    of records of this window that were already returned.
    """

    def __init__(self, parent: grain.DatasetIterator, seed: int | None, window: int):
        super().__init__(parent)
        self._seed, self._size = seed, 1 if seed is None else window
        self._number = self._given = 0
        self._begin = self._end = parent.get_state()  # the state of the files at the start and end of the window
        self._records: list[Record] = []
        self._ahead: tuple[int, Record] | None = None  # the first (epoch, record) of the next epoch, if already read

    def __next__(self) -> Record:
        if self._given == len(self._records):
            self._number, self._given, self._begin = self._number + bool(self._records), 0, self._end
            self._fill()
        self._given += 1
        return self._records[self._given - 1]

    def _fill(self) -> None:
        epoch, record = self._ahead or next(self._parent)
        window = [record]
        while True:
            self._end = self._parent.get_state()
            self._ahead = None
            if len(window) == self._size:
                break
            self._ahead = next(self._parent)
            if self._ahead[0] != epoch:
                break
            window.append(self._ahead[1])
        self._records = window
        if self._seed is not None:
            order = permuted(np.arange(len(window)), len(window), seed=self._seed + _WINDOWS, epoch=self._number)
            self._records = [window[i] for i in order]

    def get_state(self) -> dict[str, Any]:
        return {"files": self._begin, "window": self._number, "given": self._given}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["files"])
        self._begin = self._end = self._parent.get_state()
        self._number, self._given = state["window"], 0
        self._records, self._ahead = [], None
        if state["given"]:
            self._fill()
            self._given = state["given"]


class _Packed(grain.DatasetIterator):
    """Encodes records and packs them into rows.

    `get_state` returns the point from which to resume after the last returned row, see `packing.Resume`. The mark of a
    document is the state of `parent` before the document was read.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        *,
        pass_of: Callable[[Any], int],
        corpus: Corpus,
        encoder: Encoder,
        packing: Packing,
    ):
        super().__init__(parent)
        self._pass_of, self._corpus, self._encoder, self._packing = pass_of, corpus, encoder, packing
        self._restart(Resume(parent.get_state(), 0, 0))

    def _restart(self, resume: Resume) -> None:
        self._resume, self._counts = resume, Counts(noun=self._encoder.noun)
        self._rows = self._packing.rows(self._documents(), self._counts, resume.skip)
        for _ in range(resume.rows):
            next(self._rows)

    def _documents(self) -> Iterator[tuple[Any, Document]]:
        read = first = 0  # the number of records since the last document, and the pass number of the first of them
        while True:
            state = self._parent.get_state()
            number = self._pass_of(state)
            first, read = first if read else number, read + 1
            if number > first + _PASSES:
                raise UserError(
                    f"{self._corpus.label}: this process's share has no document with text: {read - 1:,} records in "
                    "succession are empty, held out or dropped; use fewer processes or workers, or "
                    "data_pipeline=prepared"
                )
            record = self._corpus.taken(next(self._parent), self._counts)
            if record is not None:
                (document,) = self._encoder.encode([record], self._counts)
                if document is not None:
                    yield state, document
                    read = 0

    def __next__(self) -> dict[str, Any]:
        row, self._resume, _ = next(self._rows)
        return row | {"counts": self._counts.take()}

    def get_state(self) -> dict[str, Any]:
        return {"records": self._resume.mark, "skip": self._resume.skip, "rows": self._resume.rows}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["records"])
        self._restart(Resume(state["records"], state["skip"], state["rows"]))

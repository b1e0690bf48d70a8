"""Finds records that are equal to an earlier record of the same data, by their 128-bit hashes, in bounded memory.

The hashes of each part's records are sorted. Then all parts are merged, one range of hashes at a time. Of several equal
records, the first in the order of the parts survives, whichever process read it.
"""

import hashlib
import itertools
import os
import platform
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainer.data.documents import Record

MEMORY = 1 << 28  # bytes of hashes that are merged at once; sorting needs about four times as much
_HASHES, _DROPPED = "hashes-{:05}", "dropped-{:05}.npy"
_RUN = 1 << 20  # the maximum number of records in a sorted file
_HASH = struct.Struct("<QQ")
_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("index", "<u4")])


def write_hashes(folder: Path, part: int, records: Iterable[Record]) -> None:
    """Writes the hashes of a part's records, each with the record's index in the part, to sorted files of bounded
    size."""
    partial = folder / f"{part}.{platform.node()}-{os.getpid()}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    digests = enumerate(hashlib.sha256(record.key()).digest() for record in records)
    for run in itertools.count():
        lines = [(*_HASH.unpack_from(digest), index) for index, digest in itertools.islice(digests, _RUN)]
        if not lines:
            break
        np.sort(np.array(lines, _DTYPE), order=["high", "low", "index"]).tofile(partial / f"{run:05}")
    try:
        partial.rename(folder / _HASHES.format(part))
    except OSError:
        if not has_hashes(folder, part):  # otherwise another process was first
            raise
        shutil.rmtree(partial)


def has_hashes(folder: Path, part: int) -> bool:
    """Returns whether `write_hashes` has completed a part."""
    return (folder / _HASHES.format(part)).exists()


def merge(folder: Path, parts: int) -> None:
    """Writes, for each part, the indices of its records that are equal to an earlier record of any part."""
    runs = [(part, path) for part in range(parts) for path in sorted((folder / _HASHES.format(part)).iterdir())]
    dropped: list[list[np.ndarray]] = [[] for _ in range(parts)]
    count = max(1, -(-sum(path.stat().st_size for _, path in runs) // MEMORY))
    bounds: list[np.uint64 | None] = [np.uint64((i << 64) // count) for i in range(count)]
    for first, last in itertools.pairwise([*bounds, None]):
        pieces = [_between(path, first, last) for _, path in runs]
        every = np.concatenate([np.zeros(0, _DTYPE), *pieces])
        part = np.repeat(np.array([part for part, _ in runs], np.uint32), [len(piece) for piece in pieces])
        order = np.lexsort((every["index"], part, every["low"], every["high"]))
        every, part = every[order], part[order]
        again = np.zeros(len(every), bool)
        again[1:] = (every["high"][1:] == every["high"][:-1]) & (every["low"][1:] == every["low"][:-1])
        found, part = every["index"][again], part[again]
        order = np.argsort(part, kind="stable")
        edges = np.searchsorted(part[order], np.arange(1, parts))
        for numbers, more in zip(dropped, np.split(found[order], edges), strict=True):
            numbers.append(more)
    for i, numbers in enumerate(dropped):
        np.save(folder / _DROPPED.format(i), np.sort(np.concatenate(numbers)))


def _between(path: Path, first: np.uint64 | None, last: np.uint64 | None) -> np.ndarray:
    """Returns the entries of a sorted file whose `high` is at least `first` and below `last`. None: no bound."""
    table = np.memmap(path, _DTYPE, "r")
    start = 0 if first is None else np.searchsorted(table["high"], first)
    return np.array(table[start : len(table) if last is None else np.searchsorted(table["high"], last)])


def surviving(folder: Path, part: int, records: Iterable[Record]) -> Iterator[tuple[Record, bool]]:
    """Yields each record of a part, and whether it survives."""
    dropped = np.load(folder / _DROPPED.format(part))
    at = 0
    for index, record in enumerate(records):
        is_dropped = at < len(dropped) and dropped[at] == index
        at += is_dropped
        yield record, not is_dropped

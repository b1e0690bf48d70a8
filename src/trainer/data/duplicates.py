"""Finds records that are equal to an earlier one of the same data, exactly and in bounded memory.

Each part gets the sorted 128-bit hashes of its records. Then all parts are merged one range of hashes at a time. Of
equal records the first in the order of parts survives, whichever process read it.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainer.data.documents import Record

MEMORY = 1 << 28  # bytes of hashes that are merged at once; sorting needs about four times as much
_HASHES, _DROPPED = "hashes-{:05}", "dropped-{:05}.npy"
_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("index", "<u4")])


def write_hashes(folder: Path, part: int, records: Iterable[Record]) -> None:
    """Writes the hashes of a part's records, sorted, and their order in the part."""
    found = bytearray()
    for record in records:
        found += hashlib.sha256(record.key()).digest()[:16]
    hashes = np.frombuffer(bytes(found), "<u8").reshape(-1, 2)
    table = np.empty(len(hashes), _DTYPE)
    table["high"], table["low"], table["index"] = hashes[:, 0], hashes[:, 1], np.arange(len(hashes))
    partial = folder / f"{part}.tmp"
    np.sort(table, order=["high", "low", "index"]).tofile(partial)
    partial.rename(folder / _HASHES.format(part))


def has_hashes(folder: Path, part: int) -> bool:
    """Returns whether `write_hashes` has completed a part."""
    return (folder / _HASHES.format(part)).exists()


def merge(folder: Path, parts: int) -> None:
    """Writes for each part the indices of records that are equal to an earlier one."""
    paths = [folder / _HASHES.format(part) for part in range(parts)]
    # An empty file cannot be memory-mapped.
    tables = [np.memmap(path, _DTYPE, "r") if path.stat().st_size else np.zeros(0, _DTYPE) for path in paths]
    dropped: list[list[np.ndarray]] = [[] for _ in tables]
    count = max(1, -(-sum(table.nbytes for table in tables) // MEMORY))
    bounds: list[np.uint64 | None] = [np.uint64((i << 64) // count) for i in range(count)]
    for first, last in itertools.pairwise([*bounds, None]):
        pieces = [_between(table, first, last) for table in tables]
        part = np.repeat(np.arange(parts, dtype=np.uint32), [len(piece) for piece in pieces])
        every = np.concatenate(pieces)
        order = np.lexsort((every["index"], part, every["low"], every["high"]))
        every, part = every[order], part[order]
        again = np.zeros(len(every), bool)
        again[1:] = (every["high"][1:] == every["high"][:-1]) & (every["low"][1:] == every["low"][:-1])
        for i in np.unique(part[again]).tolist():
            dropped[i].append(every["index"][again & (part == i)])
    for i, found in enumerate(dropped):
        np.save(folder / _DROPPED.format(i), np.sort(np.concatenate([np.zeros(0, np.uint32), *found])))


def _between(table: np.ndarray, first: np.uint64 | None, last: np.uint64 | None) -> np.ndarray:
    """Returns the lines of a sorted table with first <= high < last; None: to the end."""
    start = 0 if first is None else np.searchsorted(table["high"], first)
    return np.array(table[start : len(table) if last is None else np.searchsorted(table["high"], last)])


def surviving(folder: Path, part: int, records: Iterable[Record]) -> Iterator[tuple[Record, bool]]:
    """Yields a part's records, each with whether it survives."""
    dropped = np.load(folder / _DROPPED.format(part))
    at = 0
    for index, record in enumerate(records):
        is_dropped = at < len(dropped) and dropped[at] == index
        at += is_dropped
        yield record, not is_dropped

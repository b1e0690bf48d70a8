"""Writes Megatron-LM's indexed data sets in their published format."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def write_indexed(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "i4", *, counts_documents: bool = False
) -> None:
    """Writes `prefix`.bin and `prefix`.idx. Each document is a list of sequences, each a list of token ids.

    `counts_documents`: the header has the number of documents instead of the entries of the document index.
    """
    sequences = [np.array(sequence, f"<{dtype}") for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    first = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    starts = np.cumsum(np.append(0, sizes), dtype="<i8")[:-1] * np.dtype(dtype).itemsize
    count = len(documents) + (not counts_documents)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), count)
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + starts.astype("<i8").tobytes() + first.tobytes())


def documents_of(
    count: int, seed: int = 0, *, eod: int = 0, vocab_size: int = 200, longest: int = 90
) -> list[list[int]]:
    """Returns `count` documents of random ids from 1 on, each with `eod` at its end."""
    random = np.random.default_rng(seed)
    return [[*random.integers(1, vocab_size, random.integers(0, longest)).tolist(), eod] for _ in range(count)]

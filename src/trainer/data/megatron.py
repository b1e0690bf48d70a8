"""Megatron-LM's indexed data sets, PREFIX.bin and PREFIX.idx. Rows are read directly from the memory-mapped files.
Remote files are copied first.

PREFIX.bin contains the token ids of all sequences. PREFIX.idx is little-endian and contains, in this order:

- the header: MAGIC, the version (u8), the code of the ids' type (u1), the number of sequences (u8), and the number of
  entries in the document index (u8), instead of which some writers store the number of documents;
- the length of each sequence (i4);
- the byte offset of each sequence in PREFIX.bin (i8);
- the document index (i8): the index of the first sequence of each document, followed by the number of sequences.
"""

import glob
import io
import re
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.capabilities.data_keys import parse_mixture
from trainer.config.capabilities.token_keys import shortest_segment, split_ratios
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.data.batches import Batch, make_batch
from trainer.data.cache import Progress
from trainer.data.corpus import file_fingerprint
from trainer.data.found import announce_copies, copies_of, train_mixture
from trainer.runtime.copies import Copies
from trainer.runtime.remote import data_file, data_files

MAGIC, VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LOOK = 20  # the number of documents whose last tokens are compared with mmap_eod_id


class IndexedFile:
    """One PREFIX.bin with its index. If the prefix is a URL, both files are first copied into the folder `copies`.

    Attributes:
      paths: the local paths of PREFIX.idx and PREFIX.bin.
      offsets: the index of the first token of each document, followed by the total number of tokens:
        int64 [documents + 1].

    Raises UserError if a file is missing or damaged, or if the two files do not match. The constructor checks every
    length and offset in the index against the files' sizes, so reads never go past the end of a file.
    """

    def __init__(self, prefix: str, copies: Copies | None = None):
        self._copies: list[io.FileIO] = []  # local copies of remote files, kept open so that they are not removed
        if copies is not None and "://" in prefix:
            self._copies = [data_file(f"{prefix}{end}", copies).copied() for end in (".idx", ".bin")]
        names = [copy.name for copy in self._copies] or [f"{prefix}.idx", f"{prefix}.bin"]
        index, self.path = self.paths = Path(names[0]), Path(names[1])
        data = _mapped(index, "u1")
        if len(data) < _HEADER.size or data[: len(MAGIC)].tobytes() != MAGIC:
            raise UserError(f"{index} is not an index of Megatron-LM: it does not begin with {MAGIC!r}")
        _, version, code, sequences, documents = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if version != VERSION:
            raise UserError(f"{index} has version {version}; only version {VERSION} is supported")
        dtype = np.dtype(_DTYPES.get(code, "V"))
        if dtype.kind not in "iu":
            raise UserError(f"{index} has type code {code}, which is not a type of token ids; codes are 1 to 5 and 8")
        rest = len(data) - _HEADER.size - 12 * sequences - 8 * documents
        if rest not in (0, 8) and rest == sequences:
            raise UserError(f"{index} also has a mode for each sequence: multimodal data sets are not supported")
        if rest not in (0, 8):
            raise _damaged(index, f"{sequences} sequences and {documents} documents do not fit its {len(data)} bytes")
        at = _HEADER.size
        sizes = np.frombuffer(data, "<i4", sequences, at)
        starts = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
        first = np.frombuffer(data, "<i8", documents + rest // 8, at + 12 * sequences)
        ends = np.cumsum(np.append(0, sizes), dtype=np.int64)
        if (sizes < 0).any() or (starts != ends[:-1] * dtype.itemsize).any():
            raise _damaged(index, "the offsets of its sequences contradict their lengths")
        if len(first) < 1 or first[0] != 0 or first[-1] != sequences or (first[1:] < first[:-1]).any():
            raise _damaged(index, f"its document index does not divide {sequences} sequences into documents")
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if size != ends[-1] * dtype.itemsize:
            raise UserError(
                f"{self.path} has {size} bytes, but {index} describes {ends[-1]} tokens of {dtype.itemsize} bytes: it "
                "is truncated, or the two files do not belong together; copy both again"
            )
        self._ids = _mapped(self.path, dtype) if size else np.zeros(0, dtype)
        self.offsets = ends[first]

    def read(self, start: int, stop: int, vocab_size: int, eod: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens [start, stop), int32, and a bool mask of the tokens that end a document: tokens equal to `eod`
        or, if `eod` is -1, the last token of each document in the index.

        Raises UserError if a token is not in [0, vocab_size).
        """
        ids = self._ids[start:stop]
        if not 0 <= ids.min() <= ids.max() < vocab_size:
            at = start + int(np.argmax((ids < 0) | (ids >= vocab_size)))
            document = int(np.searchsorted(self.offsets, at, side="right")) - 1
            raise UserError(
                f"{self.path}, document {document}, holds token {self._ids[at]} and vocab_size={vocab_size}: ids must "
                f"be from 0 to {vocab_size - 1}; set vocab_size above the largest id"
            )
        if eod >= 0:
            return ids.astype(np.int32), ids == eod
        ends = np.zeros(len(ids), bool)
        ends[self.offsets[slice(*np.searchsorted(self.offsets, (start, stop), side="right"))] - start - 1] = True
        return ids.astype(np.int32), ends

    def last_tokens(self) -> list[int]:
        """Returns the last token of each of the first _LOOK documents."""
        offsets = self.offsets[: _LOOK + 1]
        return self._ids[offsets[1:][np.diff(offsets) > 0] - 1].tolist()


class TokenRows:
    """Rows that are formed like Megatron-LM's samples: the chosen documents of all files form one stream of tokens. Row
    i has tokens [i * length, (i + 1) * length) of the stream as inputs, and their successors as targets. The last row
    is padded.

    Args:
      files: the files, each with a mask of its chosen documents, bool [documents].
      eod: the token that ends a document; -1 if only the index defines where documents end.
      reset: whether a segment ends at the end of a document; otherwise each row is one segment.
      mask: whether to exclude from the loss the target that follows the last token of a document.
      shortest: with `reset`, the end of a document ends a segment only if the segment has more tokens than this.
    """

    def __init__(
        self,
        files: Sequence[tuple[IndexedFile, np.ndarray]],
        length: int,
        vocab_size: int,
        *,
        eod: int,
        reset: bool,
        mask: bool,
        shortest: int,
    ):
        self._files, self.length, self._vocab_size = [file for file, _ in files], length, vocab_size
        self._eod, self._reset, self._mask, self._shortest = eod, reset, mask, shortest
        runs = [_runs(file, chosen) for file, chosen in files]
        self._file = np.repeat(np.arange(len(runs)), [len(run) for run in runs])  # for each run of documents: its file
        begins, ends = np.concatenate(runs).T
        self._end = np.cumsum(ends - begins)  # for each run: its end in the stream
        self._shift = ends - self._end  # for each run: a token's index in the file minus that in the stream
        self.documents = sum(int(chosen.sum()) for _, chosen in files)
        self.tokens = int(self._end[-1]) if len(self._end) else 0
        self.size = -(-(self.tokens - 1) // length)  # a row needs at least two tokens

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n] as a batch (see `trainer.data.batches`) without the entry `row`."""
        return make_batch(*np.stack([self._row(int(index) * self.length) for index in indices], axis=1))

    def _row(self, first: int) -> np.ndarray:
        """Returns the inputs, targets, segment ids and loss mask of the row that begins at token `first`: int32
        [4, length]."""
        tokens, ends = self._read(first, min(first + self.length + 1, self.tokens))
        inputs, ends = tokens[:-1], ends[:-1]
        row = np.zeros((4, self.length), np.int32)
        row[:, : len(inputs)] = inputs, tokens[1:], self._segments(ends), ~ends if self._mask else ends | True
        return row

    def _segments(self, ends: np.ndarray) -> np.ndarray:
        begins = np.append(True, ends[:-1] & self._reset)
        last = 0  # the beginning of the current segment
        for begin in np.flatnonzero(begins)[1:] if self._shortest else ():
            begins[begin] = begin - last > self._shortest
            last = begin if begins[begin] else last
        return np.cumsum(begins)

    def _read(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens [first, stop) of the stream, and a bool mask of those that end a document."""
        pieces, run = [], int(np.searchsorted(self._end, first, side="right"))
        while first < stop:
            end, shift = min(stop, int(self._end[run])), int(self._shift[run])
            pieces.append(self._files[self._file[run]].read(first + shift, end + shift, self._vocab_size, self._eod))
            first, run = end, run + 1
        tokens, ends = zip(*pieces, strict=True)
        return np.concatenate(tokens), np.concatenate(ends)


def open_files(config: Config, say: Progress) -> tuple[list[TokenRows], list[Fraction], TokenRows | None, str]:
    """Returns a list of the rows of each component of grain_train_files, a list of the components' weights, the rows
    for evaluation (None without evaluation documents), and a text that identifies the training documents.

    Raises UserError if a file is missing or damaged, or if no document remains.
    """
    mixture = train_mixture(config)
    held = [pattern for pattern, _ in parse_mixture(config.grain_eval_files, "")] if config.grain_eval_files else []
    found = [_component_prefixes(config, pattern, "grain_train_files", say) for pattern, _ in mixture]
    found += [_component_prefixes(config, pattern, "grain_eval_files", say) for pattern in held]
    remote = [f"{prefix}{end}" for some in found for prefix in some if "://" in prefix for end in (".idx", ".bin")]
    announce_copies(config, [data_file(url, copies_of(config)) for url in remote], say, together=True)
    components = [_component(config, prefixes) for prefixes in found]
    train, own = components[: len(mixture)], components[len(mixture) :]
    split, share = split_ratios(config), 0 if own else config.held_out_share

    def rows(components: list[list[IndexedFile]], name: str, which: int) -> TokenRows:
        files = [pair for files in components for pair in _choose(files, split, share, which)]
        made = TokenRows(files, config.max_target_length, config.vocab_size, **boundaries(config))
        if made.size < 1:
            hint = "mmap_npy_split" if split else "held_out_share"
            raise UserError(
                f"{name}: fewer than two tokens {'are held out' if which else 'remain'}; change {hint}, or the files"
            )
        return made

    evaluation = None
    if config.eval_interval > 0 and (own or split or share):
        name = config.grain_eval_files or f"held out of {config.grain_train_files}"
        evaluation = rows(own or train, name, 0 if own and not split else 1)
    paths = [[path for file in files for path in file.paths] for files in train]
    identity = "".join(file_fingerprint(some, f"{split} {share}") for some in paths)
    made = [rows([files], pattern, 0) for files, (pattern, _) in zip(train, mixture, strict=True)]
    return made, [weight for _, weight in mixture], evaluation, identity


def boundaries(config: Config) -> dict[str, Any]:
    """Returns the arguments of `TokenRows` that specify how document ends are treated."""
    settings = {"eod": config.mmap_eod_id, "reset": config.reset_attention_mask, "mask": config.eod_mask_loss}
    return settings | {"shortest": shortest_segment(config)}


def _component_prefixes(config: Config, pattern: str, key: str, say: Progress) -> list[str]:
    """Returns the prefixes that `pattern` selects. `pattern` is a prefix, a folder, or a glob of prefixes or folders.

    With grain_file_type=mmap_npy, `pattern` is a colon-separated list of prefixes, folders and globs. The list may
    begin with `FOLDER|`, where FOLDER contains an index of rows, which is not read.
    """
    names = [pattern]
    if config.grain_file_type == "mmap_npy":
        folder, bar, rest = pattern.rpartition("|")
        names = re.split(r":(?!//|\d+/)", rest)  # a colon inside a URL is no separator
        if bar:
            say(f"{key}: the index in {folder} is not read, because data_shuffle_seed determines the order of the rows")
    return sorted(prefix for name in names for prefix in _prefixes(name.strip(), key, copies_of(config)))


def _component(config: Config, prefixes: Sequence[str]) -> list[IndexedFile]:
    files = [IndexedFile(prefix, copies_of(config)) for prefix in prefixes]
    eod = config.mmap_eod_id
    if eod >= 0 and (config.reset_attention_mask or config.eod_mask_loss):
        last = files[0].last_tokens()
        if last and eod not in last:
            raise UserError(
                f"mmap_eod_id={eod}, but none of the first {len(last)} documents of {files[0].path} ends with it; the "
                f"first ends with {last[0]}: set mmap_eod_id to the token that ends a document, or to -1 if there is "
                "none"
            )
    return files


def _prefixes(name: str, key: str, copies: Copies) -> list[str]:
    remote = "://" in name
    stem = (name if remote else str(local_path(name))).removesuffix(".idx").removesuffix(".bin")
    if remote:
        found = [file.url for file in data_files(f"{stem}*.idx" if stem.endswith("/") else f"{stem}.idx", copies)]
    else:
        found = glob.glob(f"{stem}.idx", recursive=True) or glob.glob(f"{stem}/*.idx", recursive=True)
    if not found:
        raise UserError(
            f"{key}: there is no {stem}.idx, and no folder {stem} with .idx files; give the path without .idx"
        )
    return [path.removesuffix(".idx") for path in found]


def _choose(
    files: Sequence[IndexedFile], split: Sequence[float], share: float, which: int
) -> list[tuple[IndexedFile, np.ndarray]]:
    """Returns the files of a component, each with a mask of its documents for training (`which` is 0) or evaluation
    (`which` is 1).

    The ratios `split` divide the documents in order, at bounds rounded as in Megatron-LM. Without `split`, evaluation
    gets evenly spaced documents: the fraction `share` of all documents, rounded up.
    """
    bounds = np.cumsum([0, *(len(file.offsets) - 1 for file in files)])
    count = int(bounds[-1])
    if split:
        ends = np.cumsum([0, *(ratio / sum(split) for ratio in split)]).tolist()
        first, last = (round(end * count) for end in ends[which : which + 2])
        chosen = (np.arange(count) >= first) & (np.arange(count) < last)
    else:
        chosen = (np.diff(np.ceil(np.arange(count + 1) * share)) > 0) == bool(which)
    return [(file, chosen[a:b]) for file, a, b in zip(files, bounds[:-1], bounds[1:], strict=True)]


def _runs(file: IndexedFile, chosen: np.ndarray) -> np.ndarray:
    """Returns the token range [start, end) of each run of consecutive chosen documents: int64 [runs, 2]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]])))
    runs = file.offsets[edges].reshape(-1, 2)
    return runs[runs[:, 1] > runs[:, 0]]


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    try:
        return np.memmap(path, dtype, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}; copy it or write it again")

"""dataset_type=stdlib: corpus, tokenizer and packed rows, prepared once and kept."""

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from trainer.config.errors import UserError
from trainer.data import cache, tfds_rows
from trainer.data.cache import Progress
from trainer.data.corpus import Document, fingerprint, read_corpus
from trainer.data.packing import pack
from trainer.data.tfds_rows import TfdsRows
from trainer.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer

FORMAT = 1  # counts changes to what is written, so that older folders are not read
_SPLITS = ("train", "validation")
_TOKENIZER = "tokenizer.json"
_CHUNK = 64  # documents encoded at once, between two moves of the progress bar

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """What a run reads: two sources of rows, the tokenizer, the folder they lie in, and its meta.json."""

    train: TfdsRows
    evaluation: TfdsRows
    tokenizer: Tokenizer
    folder: Path
    meta: dict[str, Any]


def open_corpus(root: Path, folder: Path, vocab_size: int, length: int, progress: Progress) -> Prepared:
    """Opens the rows of `length` tokens made of the sources below `root`; prepares them first if `folder` lacks them.

    Raises UserError for a vocabulary below 257, a corpus too small to split, a folder that cannot be written, and
    prepared files that are damaged.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size={vocab_size}: the byte-level tokenizer of dataset_type=stdlib needs at least {MIN_VOCAB_SIZE} "
            "(every byte and the end of a document)"
        )
    documents = read_corpus(root)
    corpus = fingerprint(documents)
    key = hashlib.sha256(f"{FORMAT} {vocab_size} {length} {corpus}".encode()).hexdigest()[:12]
    path = folder / f"stdlib-v{vocab_size}-l{length}-{key}"
    if not path.exists():
        splits = _split(root, documents)
        facts = {"format": FORMAT, "fingerprint": corpus, "python": platform.python_version(), "length": length}
        cache.ensure(path, lambda temporary: facts | _build(temporary, splits, vocab_size, length, progress), progress)
    return _open(path)


def _split(root: Path, documents: list[Document]) -> dict[str, list[Document]]:
    splits: dict[str, list[Document]] = {name: [] for name in _SPLITS}
    for document in documents:
        splits["validation" if document.held_out else "train"].append(document)
    if not all(splits.values()):
        train, held_out = map(len, splits.values())
        raise UserError(f"{root} holds too few .py files: {train} to train on and {held_out} held out")
    return splits


def _open(folder: Path) -> Prepared:
    meta = cache.read_meta(folder)
    try:
        dataset, counts = folder / meta["dataset"], {name: meta["splits"][name]["rows"] for name in _SPLITS}
    except (KeyError, TypeError) as error:
        raise cache.damaged(folder, cache.META, f"lacks an entry ({error})") from error
    sources = {name: TfdsRows(dataset, name) for name in _SPLITS}
    for name, source in sources.items():
        if source.size != counts[name]:
            raise cache.damaged(folder, cache.META, f"says {counts[name]} {name} rows where there are {source.size}")
    return Prepared(sources["train"], sources["validation"], Tokenizer.load(folder / _TOKENIZER), folder, meta)


def _build(
    folder: Path, splits: dict[str, list[Document]], vocab_size: int, length: int, progress: Progress
) -> dict[str, Any]:
    """Writes tokenizer and rows into `folder`; returns the counts of its meta.json."""
    sizes = [document.size for documents in splits.values() for document in documents]
    progress(f"preparing {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB: training a BPE of {vocab_size} tokens")
    tokenizer = Tokenizer.train([document.text for document in splits["train"]], vocab_size)
    tokenizer.save(folder / _TOKENIZER)
    progress("tokenizing and packing")
    rows: dict[str, dict[str, np.ndarray]] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, documents in splits.items():
        rows[name] = pack(_encode(documents, tokenizer, name), tokenizer.eot, length)
        counts[name] = _count(documents, rows[name], tokenizer)
    progress(f"writing {counts['train']['rows']} train and {counts['validation']['rows']} held-out rows")
    dataset = tfds_rows.write(folder, rows, lambda indices, count: _bar(indices, count, "writing rows"))
    return {"vocab_size": tokenizer.vocab_size, "dataset": dataset.relative_to(folder).as_posix(), "splits": counts}


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, name: str) -> list[list[int]]:
    texts = [document.text for document in documents]
    chunks = [texts[i : i + _CHUNK] for i in range(0, len(texts), _CHUNK)]
    return [ids for chunk in _bar(chunks, len(chunks), f"tokenizing {name}") for ids in tokenizer.encode_many(chunk)]


def _count(documents: Sequence[Document], rows: dict[str, np.ndarray], tokenizer: Tokenizer) -> dict[str, int]:
    real = rows["segmentation"] != 0
    size = sum(document.size for document in documents)
    counted = int(tokenizer.bytes_per_token[rows["targets"][real]].sum(dtype=np.int64))
    assert counted == size, f"targets stand for {counted} bytes of {size}"
    return {"files": len(documents), "bytes": size, "tokens": int(real.sum()), "rows": len(real)}


def _bar(items: Iterable[T], total: int, label: str) -> Iterable[T]:
    """A progress bar on stderr, only where that is a terminal."""
    return tqdm(items, label, total, leave=False, disable=None, mininterval=0.2)

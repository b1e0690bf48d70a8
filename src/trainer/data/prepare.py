"""data_pipeline=prepared: tokenizes and packs documents once, into folders that later runs reuse."""

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.capabilities.token_keys import token_files
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.data import cache
from trainer.data.cache import Progress
from trainer.data.corpus import Corpus
from trainer.data.documents import Counts, Document, Encoder
from trainer.data.packing import PackedRow, Packing
from trainer.data.rows import FILE, SUMS, StoredRows, write
from trainer.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer

FORMAT = 3  # incremented if the rows of equal documents change, so that older folders and positions are refused
BPE_BYTES = 64 << 20  # the maximum bytes of text for training a BPE
_CHUNK = 64  # documents to encode at once
_INTERVAL = 10.0  # seconds between two lines of progress if stderr is not a terminal


def open_tokenizer(
    config: Config, train: Sequence[Corpus], weights: Sequence[int], root: Path, say: Progress
) -> Tokenizer | None:
    """Returns the tokenizer of tokenizer_path and tokenizer_type. Without these keys, trains a BPE on the first 64 MiB
    of the training documents and stores it in `root`. Returns None if all columns are token ids.

    Raises UserError if vocab_size is too small for the tokenizer.
    """
    settings = {"add_bos": config.add_bos, "add_eos": config.add_eos}
    size = config.vocab_size
    if config.tokenizer_path or config.tokenizer_type == "bytes":
        tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_type, **settings)
        if tokenizer.note:
            say(tokenizer.note)
        if tokenizer.largest >= size:
            raise UserError(
                f"vocab_size={size}, but the tokenizer {config.tokenizer_path or config.tokenizer_type} has "
                f"{tokenizer.vocab_size} tokens; set vocab_size={tokenizer.largest + 1} or more, or give the model's "
                "own tokenizer_path"
            )
        joined = len(config.train_data_columns) > 1 and not any(config[key] for key in METHODS)
        if joined and (template := tokenizer.chat_template):
            say(
                f"{template.where} has a chat template, which is not applied: columns are joined as they are; "
                "trainer.sft applies it"
            )
        return tokenizer
    if not config.tokenize_train_data or token_files(config):
        return None
    if size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size={size}: the byte-level tokenizer that is trained needs at least {MIN_VOCAB_SIZE} "
            "(every byte and the end of a document)"
        )
    key = _key([FORMAT, size, BPE_BYTES, [corpus.identity for corpus in train], list(weights)])
    folder = root / f"bpe-v{size}-{key}"

    def build(temporary: Path) -> dict[str, Any]:
        texts = _texts(train, weights)
        say(f"training a BPE of {size} tokens on {sum(map(len, texts)) / 1e6:.1f} MB of text")
        with _Bar(say, f"a BPE of {size} tokens"):
            train_bpe(texts, size).save(temporary)
        return {"vocab_size": size}

    if not folder.exists():
        cache.ensure(folder, build, say)
    cache.read_meta(folder)
    return load_tokenizer(str(folder), "huggingface", **settings)


def _texts(train: Sequence[Corpus], weights: Sequence[int]) -> list[str]:
    """Returns texts from the beginning of each corpus, in total at most BPE_BYTES, in the ratio of the weights."""
    texts: list[str] = []
    for corpus, weight in zip(train, weights, strict=True):
        left = BPE_BYTES * weight // sum(weights)
        encoder = Encoder(None, corpus.columns, True, False, 0)
        for record in corpus.records():
            texts += (added := encoder.texts(record))
            left -= sum(len(text.encode()) for text in added)
            if left <= 0:
                break
    return texts


def open_rows(
    corpora: Sequence[Corpus], encoder: Encoder, packing: Packing, folder_name: str, root: Path, say: Progress
) -> tuple[Any, dict[str, Any]]:
    """Returns the concatenated rows of the corpora, and the meta.json of their folder. Prepares them if necessary.

    The folder's name is a hash of everything that determines the rows: records, tokenizer and packing.
    """
    identity = {
        "format": FORMAT,
        "files": [FILE, SUMS],
        "documents": [corpus.identity for corpus in corpora],
        "encoding": encoder.identity,
        "packing": packing.identity,
    }
    folder = root / f"{folder_name}-l{packing.length}-{_key(identity)}"
    if not folder.exists():
        cache.ensure(folder, lambda temporary: identity | _build(temporary, corpora, encoder, packing, say), say)
    meta = cache.read_meta(folder)
    if "rows" not in meta:
        raise cache.damaged(folder, cache.META, "lacks an entry ('rows')")
    rows = StoredRows(folder)
    if rows.size != meta["rows"]:
        raise cache.damaged(folder, cache.META, f"states {meta['rows']} rows, but there are {rows.size}")
    return rows, meta


def _build(
    folder: Path, corpora: Sequence[Corpus], encoder: Encoder, packing: Packing, say: Progress
) -> dict[str, Any]:
    """Writes the rows into `folder` and returns the counts for META. Raises UserError if no token bears loss."""
    name = _label(corpora)
    say(f"tokenizing and packing {name}")
    counts, totals, pairs = Counts(noun=encoder.noun), {"rows": 0, "tokens": 0}, 0
    lengths = encoder.tokenizer.bytes_per_token if encoder.tokenizer else None
    target_bytes = 0

    def summed(rows: Iterable[tuple[PackedRow, Any]]) -> Iterator[PackedRow]:
        nonlocal pairs, target_bytes
        for row, _ in rows:
            pairs += int(np.count_nonzero(row["segmentation"]))
            targets = row["targets"][row["loss"] != 0]
            totals["rows"] += 1
            totals["tokens"] += len(targets)
            if lengths is not None:
                target_bytes += int(lengths[targets].sum())
            yield row

    with _Bar(say, name) as bar:
        documents = ((None, document) for document in encoded_documents(corpora, encoder, counts, bar))
        rows = summed(packing.rows(documents, counts))
        first = next(rows, None)
        if first is None:
            raise no_text(corpora, counts, packing)
        rows = itertools.chain([first], rows)
        write(folder, rows, length=packing.length, vocab_size=encoder.limit, masked=encoder.masked)
    if not totals["tokens"]:
        raise no_loss(corpora, pairs, counts, packing)
    if encoder.whole and lengths is not None and not counts.cut:
        assert target_bytes == counts.bytes, f"targets stand for {target_bytes} bytes of {counts.bytes}"
    for note in counts.notes():
        say(note)
    records, tokens = counted(counts.documents, counts.one), counted(totals["tokens"], "trained token")
    say(f"prepared {counted(totals['rows'], 'row')}: {records}, {tokens}")
    return {**totals, **asdict(counts)}


def check_trainable(corpus: Corpus, encoder: Encoder, packing: Packing) -> None:
    """Raises UserError if no row of a corpus has a loss-bearing token. Reads only up to the first row that has one."""
    counts, pairs = Counts(noun=encoder.noun), 0
    documents = ((None, document) for document in encoded_documents([corpus], encoder, counts, lambda share: None))
    for row, _ in packing.rows(documents, counts):
        if row["loss"].any():
            return
        pairs += int(np.count_nonzero(row["segmentation"]))
    raise no_loss([corpus], pairs, counts, packing) if pairs else no_text([corpus], counts, packing)


def no_text(corpora: Sequence[Corpus], counts: Counts, packing: Packing) -> UserError:
    """Returns the error for corpora without a document."""
    first, hint = corpora[0], ""
    if counts.skipped_long:
        others = counts.notes() if counts.skipped_long < counts.skipped + counts.empty else []
        return UserError("\n".join([f"{_label(corpora)}: {counts.too_long(packing.length)}", *others]))
    if counts.unlearnt:
        lines = "\n".join([*counts.notes(), counts.unlearnt])
        return UserError(f"{_label(corpora)}: there is nothing to learn from:\n{lines}")
    if first.held_out:
        hint = (
            "; set a larger held_out_share" if first.evaluates else "; fill the column, or set a smaller held_out_share"
        )
    return UserError(f"{_label(corpora)}: there is no {counts.one} with text{hint}")


def no_loss(corpora: Sequence[Corpus], pairs: int, counts: Counts, packing: Packing) -> UserError:
    """Returns the error for corpora whose rows have `pairs` tokens, none with loss: possible only with two columns."""
    cut = f"{counts.cut:,} of them cut off by use_truncation=true, " if counts.cut else ""
    give = f"{counts.hint}, fill the column," if counts.longest else "; fill the column,"
    return UserError(
        f"{_label(corpora)}: 0 of {pairs:,} tokens contribute to the loss, in {counts.documents:,} {counts.what}, "
        f"{cut}so there is nothing to train or to evaluate on: every completion is empty, or starts "
        f"after the end of its row of max_target_length={packing.length} tokens{give} or set "
        "use_truncation=false or sft_train_on_completion_only=false"
    )


def _label(corpora: Sequence[Corpus]) -> str:
    return ", ".join(corpus.label for corpus in corpora)


def encoded_documents(
    corpora: Sequence[Corpus], encoder: Encoder, counts: Counts, track: Callable[[float], None]
) -> Iterator[Document]:
    """Yields the documents of all corpora in order. Encodes one chunk at a time."""
    for i, corpus in enumerate(corpora):
        read: list[float] = []
        records = corpus.records(read.append)
        while chunk := list(itertools.islice(records, _CHUNK)):
            yield from (document for document in encoder.encode(chunk, counts) if document is not None)
            track((i + read[-1]) / len(corpora))
            read.clear()


def _key(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


class _Bar:
    """Shows progress from 0 to 1, with an ETA: as a bar if stderr is a terminal, otherwise as lines at intervals. It
    runs in a thread, because a single document may take minutes."""

    def __init__(self, say: Progress, label: str):
        self._say, self._label, self._share = say, label, 0.0
        self._bar = tqdm(total=100, desc=label[:40], unit="%", leave=False, disable=None, mininterval=0.2)
        self._started, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, share: float) -> None:
        self._share = share

    def _show(self) -> None:
        while not self._ended.wait(_INTERVAL if self._bar.disable else 0.2):
            share, seconds = self._share, time.monotonic() - self._started
            if not self._bar.disable:
                self._bar.n = round(100 * share, 1)
                self._bar.refresh()
            else:
                left = f"{100 * share:.0f} %, {seconds * (1 - share) / share:.0f} s left" if share else ""
                self._say(f"{self._label}: {left or f'{seconds:.0f} s so far'}")

    def __enter__(self) -> "_Bar":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.close()

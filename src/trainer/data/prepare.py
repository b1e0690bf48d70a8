"""data_pipeline=prepared: tokenizes and packs documents once, into folders that later runs reuse."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.capabilities.token_keys import token_files
from trainer.config.errors import UserError
from trainer.config.json_files import Field, field_problems
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.data import cache
from trainer.data.bar import Bar
from trainer.data.cache import Progress
from trainer.data.corpus import Corpus
from trainer.data.documents import Counts, Encoder
from trainer.data.packing import Packing
from trainer.data.parts import Cut, Work, documents_of, parts_of, total, write_parts
from trainer.data.rows import FILE, SUMS, StoredRows
from trainer.data.tokenizer import MIN_VOCAB_SIZE, Tokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer

# Incremented by each change of the program that makes different rows from the same documents, so that folders and
# positions of earlier versions are refused.
FORMAT = 3
# The required entries of the file META, and the entries that exist only if there are several parts.
_COUNTS = {"rows": Field(int, 1, 1 << 62), "tokens": Field(int, 0, 1 << 62), "documents": Field(int, 0, 1 << 62)}
_PARTS = {"parts": Field(int, 2), "stored": Field(list)}
BPE_BYTES = 64 << 20  # the approximate maximum size of the text on which a BPE is trained


def open_tokenizer(
    config: Config, train: Sequence[Corpus], weights: Sequence[int], root: Path, say: Progress
) -> Tokenizer | None:
    """Returns the tokenizer that tokenizer_path and tokenizer_type select. If these keys select no tokenizer, the
    result is None if the columns contain token ids; otherwise, it is a BPE that is trained on up to about 64 MiB of the
    training documents and stored in `root` for reuse.

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
                f"{tokenizer.vocab_size} tokens; set vocab_size={tokenizer.largest + 1} or more, or set "
                "tokenizer_path to the model's tokenizer"
            )
        joined = len(config.train_data_columns) > 1 and not any(config[key] for key in METHODS)
        if joined and (template := tokenizer.chat_template):
            say(
                f"{template.where} has a chat template, which is not applied: columns are joined unchanged; "
                "trainer.sft applies the template"
            )
        return tokenizer
    if not config.tokenize_train_data or token_files(config):
        return None
    if size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size={size}: training a byte-level tokenizer needs at least {MIN_VOCAB_SIZE} "
            "(one token for each byte, and one for the end of a document)"
        )
    key = _key([FORMAT, size, BPE_BYTES, [corpus.identity for corpus in train], list(weights)])
    folder = root / f"bpe-v{size}-{key}"

    def build(temporary: Path) -> dict[str, Any]:
        texts = _texts(train, weights)
        say(f"training a BPE of {size} tokens on {sum(map(len, texts)) / 1e6:.1f} MB of text")
        with Bar(say, f"a BPE of {size} tokens"):
            train_bpe(texts, size).save(temporary)
        return {"vocab_size": size}

    if not folder.exists():
        cache.ensure(folder, build, say)
    cache.read_meta(folder)
    return load_tokenizer(str(folder), "huggingface", **settings)


def _texts(train: Sequence[Corpus], weights: Sequence[int]) -> list[str]:
    """Returns texts from the beginning of each corpus, in total up to about BPE_BYTES, in the ratio of the weights."""
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


class Rows(NamedTuple):
    """Prepared rows in a folder, and the contents of the folder's file META."""

    folder: Path
    meta: dict[str, Any]
    source: StoredRows


def open_rows(
    corpora: Sequence[Corpus],
    encoder: Encoder,
    packing: Packing,
    folder_name: str,
    root: Path,
    say: Progress,
    cut: Cut = Cut(),  # noqa: B008
) -> Rows:
    """Returns the concatenated rows of the corpora. Prepares them if necessary.

    The folder's name contains a hash of everything that determines the rows: records, tokenizer, packing and parts.
    """
    identity = {
        "format": FORMAT,
        "files": [FILE, SUMS],
        "documents": [corpus.identity for corpus in corpora],
        "encoding": encoder.identity,
        "packing": packing.identity,
    }
    parts = parts_of(corpora, cut.size)
    if len(parts) > 1:
        identity["parts"] = [[(i, piece.part, piece.start, piece.stop) for i, piece in part] for part in parts]
    folder = root / f"{folder_name}-l{packing.length}-{_key(identity)}"
    if not folder.exists():
        if len(parts) > 1:
            identity["parts"] = len(parts)  # META stores only the number, because the list may be long

        def build(temporary: Path) -> dict[str, Any]:
            return identity | _build(Work(corpora, encoder, packing, parts, temporary), cut, say)

        cache.ensure(folder, build, say, continues=len(parts) > 1)
    return read_rows(folder)


def read_rows(folder: Path, limit: int = 1 << 31) -> Rows:
    """Returns the rows in a folder that `open_rows` made. `limit`: the upper bound (exclusive) of the token ids.

    Raises UserError if the folder is damaged.
    """
    meta = cache.read_meta(folder)
    problems = [f"lacks an entry ({name!r})" for name in _COUNTS if name not in meta]
    problems = problems or field_problems(meta, _COUNTS | _PARTS)
    stored = meta.get("stored", []) if not problems else []
    if not all(isinstance(one, list) and len(one) == 2 and _is_part(*one) for one in stored):
        problems.append("names no folders of parts")
    if problems:
        raise cache.damaged(folder, cache.META, problems[0])
    stored = [(folder / name, rows) for name, rows in stored] or [(folder, meta["rows"])]
    return Rows(folder, meta, StoredRows(stored, limit))


def _is_part(name: Any, rows: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"part-\d+", name) is not None and type(rows) is int and rows > 0


def _build(work: Work, cut: Cut, say: Progress) -> dict[str, Any]:
    """Writes the rows of all parts, and returns the META entries that describe them.

    Raises UserError if there are no rows, or if no token contributes to the loss.
    """
    corpora, packing, name = work.corpora, work.packing, _label(work.corpora)
    parts = f" in {len(work.parts)} parts" if len(work.parts) > 1 else ""
    say(f"tokenizing and packing {name}{parts}")
    written = write_parts(work, cut, name, say)
    totals, counts = total(written, work.encoder.noun)
    if not totals.rows:
        raise no_text(corpora, counts, packing)
    if not totals.tokens:
        raise no_loss(corpora, totals.pairs, counts, packing)
    for note in counts.notes():
        say(note)
    records, tokens = counted(counts.documents, counts.one), counted(totals.tokens, "trained token")
    say(f"prepared {counted(totals.rows, 'row')}: {records}, {tokens}")
    meta = {"rows": totals.rows, "tokens": totals.tokens, **asdict(counts)}
    if not parts:
        return meta | {"names": written[0].names}
    rows = [part.totals.rows for part in written]
    return meta | {"stored": [(work.place(i).name, count) for i, count in enumerate(rows) if count]}


def check_trainable(corpus: Corpus, encoder: Encoder, packing: Packing) -> None:
    """Raises UserError if no token of a corpus contributes to the loss. Reads only up to the first row with such a
    token."""
    counts, pairs = Counts(noun=encoder.noun), 0
    documents = documents_of([corpus], encoder, counts)
    for row, *_ in packing.rows(documents, counts):
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
    if counts.noticed:
        return UserError("\n".join([f"{_label(corpora)}: nothing is left:", *counts.notes()]))
    if first.held_out:
        hint = (
            "; set a larger held_out_share" if first.evaluates else "; fill the column, or set a smaller held_out_share"
        )
    return UserError(f"{_label(corpora)}: there is no {counts.one} with text{hint}")


def no_loss(corpora: Sequence[Corpus], pairs: int, counts: Counts, packing: Packing) -> UserError:
    """Returns the error for corpora of which no token contributes to the loss. Only corpora with two columns, a prompt
    and its completion, can cause it. `pairs`: the number of tokens in the corpora's rows."""
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


def _key(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

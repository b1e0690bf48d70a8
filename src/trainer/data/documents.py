"""Encodes records of a source as documents: tokens, including special tokens, and a mask of the targets that contribute
to the loss."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from trainer.config.derived import row_for
from trainer.config.errors import UserError
from trainer.data.text import canonical, decoded, encoding_hint, mended
from trainer.data.tokenizer import Tokenizer


class Location(NamedTuple):
    """The location of a record, printable with `str`: a file or table, and the record's number in it.

    `unit` is the word before the number, such as line; "" if the whole file is one record.
    """

    name: str
    number: int = 0
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.unit} {self.number}" if self.unit else self.name


class Record(NamedTuple):
    """A record of a source: its `Location`, and the values of its columns, which are text, bytes or token ids."""

    where: Any
    values: tuple[Any, ...]

    def key(self) -> bytes:
        """Returns the key that decides whether a record is held out. The key consists of the record's contents, so that
        either all copies of a record are held out, or none."""
        return b"\0".join(map(_bytes_of, self.values))


class Document(NamedTuple):
    """Tokens [n + 1], int32, and whether each of the n targets contributes to the loss (None: all of them).

    `after`: documents that must directly follow in the same row, each as a separate segment. A document with `after` is
    not split, so `places()` must be at most the row length.
    """

    tokens: np.ndarray
    loss: np.ndarray | None
    after: "tuple[Document, ...]" = ()

    @property
    def pairs(self) -> int:
        """The number of pairs of an input and its target, not counting `after`."""
        return len(self.tokens) - 1

    def places(self, align: int = 1) -> int:
        """Returns how many positions of a row the document and `after` occupy. Each segment begins at a multiple of
        `align`."""
        end = self.pairs
        for document in self.after:
            end += -end % align + document.pairs
        return end


@dataclass
class Counts:
    """Counts of skipped, cut and changed documents."""

    documents: int = 0
    empty: int = 0  # documents without text, which are skipped
    bytes: int = 0  # bytes of the documents' text
    split: int = 0  # documents longer than (the rest of) a row, which continue in another row
    cut: int = 0  # documents truncated by use_truncation, and the tokens lost
    cut_tokens: int = 0
    without_loss: int = 0  # documents without a token that contributes to the loss
    mended: int = 0  # documents with lone surrogates, the number of surrogates, and the location of the first
    mended_characters: int = 0
    mended_first: str = ""
    noun: str = ""  # what messages call a record; "": document
    skipped: int = 0  # records that an encoder skipped although they have text, and how many were too long
    skipped_long: int = 0
    longest: int = 0  # tokens of the longest record that cannot be trained because it is longer than a row
    # Maps each kind of observation about records to the number of observations, and to a text about the first one,
    # which is printed after the number.
    noticed: dict[str, tuple[int, str]] = field(default_factory=dict)
    unlearnt: str = ""  # text of the first document that an encoder skipped because it has no target to train

    described: list[str] = field(default_factory=list)  # the kinds in `noticed` that `take` has returned

    def notice(self, kind: str, line: Callable[[], str], count: int = 1) -> None:
        """Counts `count` more observations of the kind `kind`. `line` returns a text about the first observation, and
        is not called for later ones, because locating a record is slow."""
        before, first = self.noticed.get(kind) or (0, "" if kind in self.described else line())
        self.noticed[kind] = before + count, first

    def long(self, tokens: int) -> None:
        """Counts a record that is skipped because all tokens that contribute to its loss are beyond the end of a
        row."""
        self.skipped_long += 1
        self.longest = max(self.longest, tokens)

    def too_long(self, length: int) -> str:
        """Returns a message with the number of records that are skipped because they are longer than `length`, and the
        remedy."""
        every = self.documents + self.empty + self.skipped
        many = "all" if self.skipped_long == every else f"{self.skipped_long:,} of"
        return f"{many} {every:,} {self.what} are longer than max_target_length={length}{self.hint}"

    @property
    def hint(self) -> str:
        """The end of a message about records that are longer than a row."""
        return f" (longest {self.longest:,}); give max_target_length={row_for(self.longest)}"

    @property
    def what(self) -> str:
        """The noun for records in messages, in the plural."""
        return f"{self.one}s"

    @property
    def one(self) -> str:
        """The noun for a record in messages."""
        return self.noun or "document"

    def take(self) -> "Counts":
        """Returns the counts since the last call, and resets them."""
        taken = replace(self)
        self.__init__(noun=self.noun, described=[*{*self.described, *self.noticed}])  # type: ignore[misc]
        return taken

    def add(self, other: "Counts") -> None:
        """Adds counts returned by `take`."""
        firsts = {name: getattr(self, name) or getattr(other, name) for name in ("mended_first", "unlearnt", "noun")}
        firsts["longest"] = max(self.longest, other.longest)
        for kind, (count, line) in other.noticed.items():
            before, first = self.noticed.get(kind, (0, line))
            self.noticed[kind] = before + count, first
        for name in (one.name for one in fields(self) if one.type == "int" or one.type is int):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        vars(self).update(firsts)

    def notes(self) -> list[str]:
        """Returns notes for the user, one line for each kind."""
        return list(self.notes_by_kind().values())

    def notes_by_kind(self) -> dict[str, str]:
        """Returns a dict from the kind of each note to the note. Notes that differ only in their numbers have the same
        kind."""
        notes = {}
        if self.empty:
            every = self.documents + self.empty
            notes["empty"] = f"{self.empty:,} of {every:,} {self.what} have no text and are skipped"
        if self.cut:
            notes["cut"] = (
                f"{self.cut:,} of {self.documents:,} {self.what} are too long and lose {self.cut_tokens:,} "
                "tokens (use_truncation=true)"
            )
        if self.without_loss:
            notes["without_loss"] = (
                f"{self.without_loss:,} of {self.documents:,} {self.what} have no token that contributes to the loss: "
                "their completion is empty, or starts after the end of the row"
            )
        if self.mended:
            every = self.documents + self.empty
            notes["mended"] = (
                f"lone surrogates are replaced by U+FFFD: {self.mended_characters:,} in {self.mended:,} of {every:,} "
                f"{self.what}, the first in {self.mended_first}"
            )
        return notes | {kind: f"{count:,} {line}" for kind, (count, line) in self.noticed.items()}


def is_held_out(key: bytes, share: float) -> bool:
    """Returns whether a record is held out for evaluation, in a source without an evaluation split. `key`: the result
    of `Record.key`. `share`: the fraction of records to hold out."""
    word = hashlib.sha256(b"held out: " + key).digest()[:8]
    return int.from_bytes(word, "big") < share * 2**64


@dataclass(frozen=True)
class Encoder:
    """Encodes records as documents.

    Attributes:
      tokenizer: None only if `tokenize` is false.
      columns: the names of the columns. Two columns are a prompt and its completion.
      tokenize: whether the values are text; if false, they are token ids.
      completion_only: whether, with two columns, only the tokens of the second contribute to the loss.
      vocab_size: the exclusive upper bound of ids.
      noun: what messages call a record.
    """

    noun: ClassVar[str] = "document"

    tokenizer: Tokenizer | None
    columns: tuple[str, ...]
    tokenize: bool
    completion_only: bool
    vocab_size: int

    @property
    def masked(self) -> bool:
        """Whether some tokens of a document do not contribute to the loss."""
        return self.completion_only and len(self.columns) > 1

    @property
    def whole(self) -> bool:
        """Whether the targets of a document cover all of its text."""
        return self.tokenize and self.tokenizer is not None and self.tokenizer.bos is not None and not self.masked

    @property
    def limit(self) -> int:
        """The upper bound (exclusive) of the ids in documents."""
        return self.tokenizer.vocab_size if self.tokenize and self.tokenizer else self.vocab_size

    @property
    def identity(self) -> dict[str, Any]:
        """A JSON-compatible value, equal for encoders that make equal documents from equal records."""
        effective = {
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer else None,
            "columns": len(self.columns),  # the source's identity contains their names
            "completion_only": self.masked,
            "vocab_size": None if self.tokenize else self.vocab_size,  # a tokenizer defines its vocabulary size
        }
        # Lists all dataclass fields, so that a new field cannot be forgotten.
        return {one.name: effective.get(one.name, getattr(self, one.name)) for one in fields(self)}

    def encode(self, records: Sequence[Record], counts: Counts) -> list[Document | None]:
        """Returns the documents of `records`, with None for a record without text or without a target.

        If a value is not UTF-8, has a wrong type, or is an id out of range, raises a UserError that names the record.
        """
        if self.tokenize:
            texts = [text for record in records for text in self.texts(record, counts)]
            assert self.tokenizer is not None
            counts.bytes += sum(len(text.encode()) for text in texts)
            flat = [np.array(ids, np.int32) for ids in self.tokenizer.encode_many(texts)]
        else:
            flat = [self._ids(value, name, record) for record in records for value, name in self._named(record)]
        width = len(self.columns)
        documents = [self._document(flat[i : i + width]) for i in range(0, len(flat), width)]
        missing = sum(document is None for document in documents)
        counts.empty += missing
        counts.documents += len(documents) - missing
        return documents

    def texts(self, record: Record, counts: Counts | None = None) -> list[str]:
        """Returns the text of each column. Replaces and counts lone surrogates. Raises UserError, as `encode` does."""
        pairs = [text_of(value, name, record) for value, name in self._named(record)]
        replaced = sum(number for _, number in pairs)
        if counts is not None and replaced:
            counts.mended_first = counts.mended_first or mended(str(record.where))[0]
            counts.mended += 1
            counts.mended_characters += replaced
        return [text for text, _ in pairs]

    def _named(self, record: Record) -> Iterable[tuple[Any, str]]:
        return zip(record.values, self.columns, strict=True)

    def _document(self, parts: Sequence[np.ndarray]) -> Document | None:
        if not any(len(part) for part in parts):
            return None
        bos = [self.tokenizer.bos] if self.tokenizer is not None and self.tokenizer.bos is not None else []
        eos = [self.tokenizer.eos] if self.tokenizer is not None and self.tokenizer.eos is not None else []
        tokens = np.concatenate([np.array(bos, np.int32), *parts, np.array(eos, np.int32)])
        if len(tokens) < 2:
            return None
        loss = None
        if self.masked:
            loss = np.arange(1, len(tokens)) >= len(bos) + len(parts[0])
        return Document(tokens, loss)

    def _ids(self, value: Any, name: str, record: Record) -> np.ndarray:
        try:
            array = np.atleast_1d(np.asarray(value if value is not None else []))
        except ValueError:  # lists of unequal length
            array = np.zeros(1, object)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise UserError(
                f"{record.where}: column {name} holds {type(value).__name__}, not a list of token ids; set "
                "tokenize_train_data or tokenize_eval_data to true for text"
            )
        wrong = array[(array < 0) | (array >= self.vocab_size)] if array.size else array
        if wrong.size:
            raise UserError(
                f"{record.where}: column {name} holds token {wrong[0]} and vocab_size={self.vocab_size}: ids "
                f"must be from 0 to {self.vocab_size - 1}; set vocab_size above the largest id"
            )
        return array.astype(np.int32)


def _bytes_of(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, str | bytes):
        return canonical(value)
    try:
        return repr(np.asarray(value).tolist()).encode()
    except ValueError:  # lists of unequal length
        return repr(value).encode()


def text_of(value: Any, name: str, record: Record) -> tuple[str, int]:
    """Returns the text of a value, and the number of lone surrogates that were replaced in it."""
    if value is None:
        return "", 0
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, bytes):
        try:
            return decoded(value)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{record.where}: column {name} is not UTF-8 at byte {error.start}{encoding_hint(value)}; convert the "
                "file, or remove the record"
            ) from error
    if not isinstance(value, str):
        messages = isinstance(value, list) and value and isinstance(value[0], dict)
        instead = "for token ids set tokenize_train_data or tokenize_eval_data to false"
        instead = "python -m trainer.sft trains on conversations (use_sft=true)" if messages else instead
        raise UserError(f"{record.where}: column {name} holds {type(value).__name__}, not text; {instead}")
    return mended(value)

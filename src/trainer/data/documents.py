"""Records of a source to documents: tokens with their special tokens, and which of them bear loss."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import UserError
from trainer.data.tokenizer import Tokenizer


class Record(NamedTuple):
    """What a source gives: where it stands, in words, and its columns' values: text, bytes, or token ids."""

    where: str
    values: tuple[Any, ...]

    def key(self) -> bytes:
        """What the choice of held-out records goes by: the contents, so that copies go together."""
        return b"\0".join(map(_bytes_of, self.values))


class Document(NamedTuple):
    """Tokens [n + 1], int32, and for the n targets behind the first whether they bear loss; None: all do."""

    tokens: np.ndarray
    loss: np.ndarray | None

    @property
    def pairs(self) -> int:
        """Pairs of an input and its target."""
        return len(self.tokens) - 1


@dataclass
class Counts:
    """What became of the documents."""

    documents: int = 0
    empty: int = 0  # without text, skipped
    bytes: int = 0  # of the documents' text
    split: int = 0  # longer than (what was left of) a row, continued in another
    cut: int = 0  # documents that lost their end to use_truncation, and the tokens lost
    cut_tokens: int = 0

    def take(self) -> tuple[int, ...]:
        """The counts so far, and begins anew."""
        values = tuple(asdict(self).values())
        self.__init__()  # type: ignore[misc]
        return values

    def add(self, values: Iterable[int]) -> None:
        """Adds what `take` gave."""
        for name, value in zip(asdict(self), values, strict=True):
            setattr(self, name, getattr(self, name) + int(value))

    def notes(self) -> list[str]:
        """What a person should know."""
        notes = []
        if self.empty:
            notes.append(f"{self.empty:,} of {self.documents + self.empty:,} documents have no text and are skipped")
        if self.cut:
            notes.append(
                f"{self.cut:,} of {self.documents:,} documents are longer than a row and lose {self.cut_tokens:,} "
                "tokens (use_truncation=true)"
            )
        return notes


def is_held_out(key: bytes, share: float) -> bool:
    """Whether a record belongs to the `share` that evaluation takes of a source without a split for it."""
    word = hashlib.sha256(b"held out: " + key).digest()[:8]
    return int.from_bytes(word, "big") < share * 2**64


@dataclass(frozen=True)
class Encoder:
    """Records to documents.

    Attributes:
      tokenizer: None only where `tokenize` is false.
      columns: their names; of two the first is a prompt, the second its completion.
      tokenize: false where the values are token ids.
      completion_only: of two columns only the second bears loss.
      vocab_size: ids must lie below it.
    """

    tokenizer: Tokenizer | None
    columns: tuple[str, ...]
    tokenize: bool
    completion_only: bool
    vocab_size: int

    @property
    def masked(self) -> bool:
        """Whether some tokens of a document bear no loss."""
        return self.completion_only and len(self.columns) > 1

    def encode(self, records: Sequence[Record], counts: Counts) -> list[Document | None]:
        """The documents of `records`, None for one without text or without a target.

        Raises UserError that names the record: bytes that are no UTF-8, a value of another type, an id out of range.
        """
        if self.tokenize:
            texts = [text for record in records for text in self.texts(record)]
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

    def texts(self, record: Record) -> list[str]:
        """The text of each column of a record; UserError as for `encode`."""
        return [_text(value, name, record) for value, name in self._named(record)]

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
        array = np.atleast_1d(np.asarray(value if value is not None else [], dtype=None))
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise UserError(
                f"{record.where}: column {name} holds {type(value).__name__}, not a list of token ids; set "
                "tokenize_train_data or tokenize_eval_data to true for text"
            )
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.vocab_size:
            raise UserError(
                f"{record.where}: column {name} holds token {int(array.max())} and vocab_size={self.vocab_size}: ids "
                f"lie from 0 to {self.vocab_size - 1}; set vocab_size above the largest id"
            )
        return array.astype(np.int32)


def _bytes_of(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else repr(np.asarray(value).tolist()).encode()


def _text(value: Any, name: str, record: Record) -> str:
    if value is None:
        return ""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{record.where}: column {name} is not UTF-8 at byte {error.start}; convert the file, or remove "
                "the record"
            ) from error
    if not isinstance(value, str):
        raise UserError(
            f"{record.where}: column {name} holds {type(value).__name__}, not text; for token ids set "
            "tokenize_train_data or tokenize_eval_data to false"
        )
    return value

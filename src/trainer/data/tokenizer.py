"""Tokenizers: the interface, tokenizers in tokenizer.json files (also the one that we train), and bytes."""

import abc
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_FILES

if TYPE_CHECKING:
    import tokenizers

EOT_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte, and the special token
JSON_FILE, CONFIG_FILE = TOKENIZER_FILES["huggingface"], TOKENIZER_CONFIG


class Tokenizer(abc.ABC):
    """Converts text to tokens and back.

    Attributes:
      vocab_size: ids are smaller than this.
      largest: the largest id of a document. Published tokenizers have special tokens after those of the model, which no
        document gets, such as Gemma 3's for images.
      bos, eos: the tokens before and after each document; None if there is none.
      bytes_per_token: the bytes of text that each token stands for, int32 [vocab_size], 0 for special tokens; None if
        this is not exact, because the tokenizer changes the text.
      chat_template: the file with its template for chats, which nothing here applies; "" if there is none.
    """

    vocab_size: int
    bos: int | None
    eos: int | None
    bytes_per_token: np.ndarray | None = None
    chat_template: str = ""

    @property
    def largest(self) -> int:
        return self.vocab_size - 1

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that give equal documents."""

    @abc.abstractmethod
    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Returns the tokens of each text, without special tokens. The name of a special token in a text is plain
        text."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without special tokens. Bytes that are not valid UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Writes the files from which tokenizer_path can read this tokenizer again into `directory`."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`, without special tokens."""
        return list(self.encode_many([text])[0])


class JsonTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json."""

    def __init__(self, inner: "tokenizers.Tokenizer", bos: str | None, eos: str | None):
        # The name of a special token in a text is plain text. This setting is not part of the saved file.
        inner.encode_special_tokens = True
        self._inner, self._names = inner, (bos, eos)
        ids = inner.get_vocab()
        self.vocab_size = max(ids.values()) + 1
        self.bos, self.eos = (None if name is None else ids[name] for name in self._names)
        if _is_byte_level(json.loads(inner.to_str())):
            self.bytes_per_token = np.zeros(self.vocab_size, np.int32)
            for token, i in ids.items():
                # A byte-level token is written with one character per byte.
                self.bytes_per_token[i] = len(token)
            for i, added in inner.get_added_tokens_decoder().items():
                self.bytes_per_token[i] = 0 if added.special else len(added.content.encode())

    @property
    def largest(self) -> int:
        added = self._inner.get_added_tokens_decoder().items()
        unused = {i for i, token in added if token.special} - {self.bos, self.eos}
        return max((i for i in self._inner.get_vocab().values() if i not in unused), default=-1)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._names} {self._inner.to_str()}".encode()).hexdigest()

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        try:
            if len(texts) == 1 and len(texts[0]) < 1 << 20:  # `encode` lets no other thread run
                return [self._inner.encode(texts[0], add_special_tokens=False).ids]
            return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # the package raises plain Exception
            if type(error) is not Exception:
                raise
            if len(texts) > 1:
                return [ids for text in texts for ids in self.encode_many([text])]  # finds the text
            raise UserError(
                f"the tokenizer cannot encode the text {shortened(texts[0])!r} ({error}); a tokenizer without a token "
                "for unknown text must have tokens for all text: take another tokenizer_path, or add the token to its "
                "vocabulary"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=True)

    @property
    def template(self) -> list[int]:
        """The special tokens that the tokenizer.json itself puts before a text."""
        ids = self._inner.encode("", add_special_tokens=True).ids
        return [token for token in ids if token != self._inner.token_to_id(self._names[1] or "") or token == self.bos]

    def save(self, directory: Path) -> None:
        (directory / JSON_FILE).write_text(self._inner.to_str(pretty=True), encoding="utf-8")
        bos, eos = self._names
        (directory / CONFIG_FILE).write_text(json.dumps({"bos_token": bos, "eos_token": eos}) + "\n", encoding="utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int, *, add_bos: bool = True, add_eos: bool = True) -> JsonTokenizer:
    """Trains a byte-level BPE of `vocab_size` tokens, or fewer if the texts are short. Equal texts give equal
    tokenizers.

    It has one special token, which is put before and after each document.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return JsonTokenizer(bpe, EOT_TEXT if add_bos else None, EOT_TEXT if add_eos else None)


class ByteTokenizer(Tokenizer):
    """Each byte of the UTF-8 text is a token. Token 256 is put before and after each document."""

    def __init__(self, *, add_bos: bool = True, add_eos: bool = True):
        self.vocab_size = 257
        self.bos, self.eos = 256 if add_bos else None, 256 if add_eos else None
        self.bytes_per_token = np.array([1] * 256 + [0], np.int32)

    @property
    def fingerprint(self) -> str:
        return f"bytes {self.bos} {self.eos}"

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]  # type: ignore[misc]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, directory: Path) -> None:
        (directory / CONFIG_FILE).write_text(json.dumps({"tokenizer_type": "bytes"}) + "\n", encoding="utf-8")


def _is_byte_level(spec: dict[str, Any]) -> bool:
    """Returns whether the tokens of this tokenizer.json stand for exactly the bytes of the text."""
    if spec.get("normalizer") or (spec.get("decoder") or {}).get("type") != "ByteLevel":
        return False
    steps = spec.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    return len(levels) == 1 and not levels[0].get("add_prefix_space")

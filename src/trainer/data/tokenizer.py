"""The byte-level BPE that is trained on the corpus, and its file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

EOT_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte, and the special token


class Tokenizer:
    """Text to tokens and back, byte for byte. The one special token, `eot`, stands before and after a document."""

    def __init__(self, bpe: tokenizers.Tokenizer):
        # The special token's name inside a text is text; this setting is not part of the saved file.
        bpe.encode_special_tokens = True
        self._bpe = bpe
        self.vocab_size: int = bpe.get_vocab_size()
        ids = bpe.get_vocab()
        self.eot = ids[EOT_TEXT]
        self.bytes_per_token = np.zeros(self.vocab_size, np.int32)
        """Bytes that each token stands for, [vocab_size], int32; 0 for `eot`."""
        for token, i in ids.items():
            # A byte-level token is written with one character per byte.
            self.bytes_per_token[i] = 0 if i == self.eot else len(token)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """A tokenizer of `vocab_size` tokens, or fewer if the texts are short; equal texts give equal tokenizers."""
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
        return cls(bpe)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote."""
        return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        """Writes the tokenizer as a tokenizer.json."""
        path.write_text(self._bpe.to_str(pretty=True), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without `eot`."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are no valid UTF-8 become U+FFFD."""
        return self._bpe.decode(list(ids), skip_special_tokens=True)

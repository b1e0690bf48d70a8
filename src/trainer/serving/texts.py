"""Converts the tokens of a choice (one generated answer) to text as the tokens arrive.

The text contains only complete characters, and ends before a stop string.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from trainer.data.tokenizer import Tokenizer
from trainer.inference.scheduler import Event
from trainer.inference.text import TextStream

_REPLACEMENT = "\ufffd"


class Token(NamedTuple):
    """A token of a text. `start`: the index of the token's first character in the text of the choice."""

    id: int
    log_prob: float | None
    likeliest: Sequence[tuple[int, float]]
    start: int


class Text:
    """The text of a choice.

    Attributes:
      stopped: whether a stop string ended the text.
      count: the number of generated tokens, including the token that ended the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self.stopped, self.count = False, 0
        self._stream, self._stop = TextStream(tokenizer, prompt), stop
        self._held, self._told, self._tokens = "", 0, list[Token]()

    def add(self, event: Event) -> tuple[str, list[Token]]:
        """Adds an event: a token, the end of the choice, or both. Returns the text that is now final, with its tokens.

        Text that may be the beginning of a stop string is held back, and a stop string is not returned.
        """
        if self.stopped:
            return "", []
        token = event.stopped if event.token is None else event.token
        if token is not None:
            start = self._told + len(self._held)
            self._tokens.append(Token(token, event.log_prob, event.likeliest or (), start))
            self.count += 1
        if event.token is not None:
            self._held += self._stream.add(event.token)
        if event.end is not None:
            rest = self._stream.end()
            self._held += rest.rstrip(_REPLACEMENT) if self._stream.is_cut() else rest
        found = [i for i in map(self._held.find, self._stop) if i >= 0]
        self.stopped = bool(found)
        ended = self.stopped or event.end is not None
        size = min(found) if found else len(self._held) - (0 if ended else self._uncertain())
        return self._released(size, all_tokens=ended and not self.stopped)

    def _uncertain(self) -> int:
        """Returns how many characters at the end of the text that is held back may be the beginning of a stop
        string."""
        longest = max(map(len, self._stop), default=1) - 1
        text = self._held[-longest:] if longest else ""
        ends = (text[i:] for i in range(len(text)))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _released(self, size: int, all_tokens: bool) -> tuple[str, list[Token]]:
        text, self._held = self._held[:size], self._held[size:]
        self._told += size
        count = sum(all_tokens or token.start < self._told for token in self._tokens)
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return text, tokens


class Names:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {i: name for name, i in tokenizer.special_tokens.items()}
        self.bytes_of = functools.lru_cache(1 << 16)(self._bytes_of)

    def text(self, token: int) -> str:
        """Returns the text of a token. If its bytes are not complete characters, returns "bytes:" and the bytes in
        hexadecimal."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _bytes_of(self, token: int) -> bytes:
        if (name := self._special.get(token)) is not None:
            return name.encode()
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.vocab_size else b""

    def starts(self, tokens: Sequence[int]) -> list[int]:
        """Returns, for each token, the index of its first character in the text of all tokens. Special tokens have no
        characters."""
        found, characters = [], 0
        for token in tokens:
            found.append(characters)
            if token not in self._special:
                characters += sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token))
        return found

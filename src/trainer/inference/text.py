"""Converts prompts to tokens, and tokens to text as they arrive."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.config.errors import UserError
from trainer.data.text import mended
from trainer.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # the decoded form of bytes that do not form a complete character yet


class Chat(Protocol):
    """Converts a prompt to the tokens of a conversation. An implementation is `chat.encoder.Prompts`."""

    def tokens(self, prompt: str) -> list[int]:
        """Returns the tokens of the conversation up to the beginning of the assistant's turn."""
        ...

    def stop_tokens(self) -> list[int]:
        """Returns the tokens that end an assistant's turn."""
        ...


def tokens_of(
    prompt: str,
    tokenizer: Tokenizer,
    begin: Sequence[int],
    longest: int,
    say: Callable[[str], None],
    chat: Chat | None = None,
) -> list[int]:
    """Returns the tokens of `prompt`, preceded by the tokens `begin`; with `chat`, returns `chat.tokens` of the prompt.

    Raises:
      UserError: there are no tokens, or more than `longest`.
    """
    text, replaced = mended(prompt)
    if replaced:
        say(f"prompt: lone surrogates are replaced by U+FFFD: {replaced}")
    tokens = chat.tokens(text) if chat else [*begin, *tokenizer.encode(text)]
    if not tokens:
        raise UserError("the prompt is empty, and the tokenizer has no token for the beginning of a document")
    if len(tokens) > longest:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, at most {longest} are allowed: max_prefill_predict_length limits "
            "the prompt, and max_target_length the prompt and its continuation; shorten the prompt or increase the keys"
        )
    return tokens


class TextStream:
    """Converts a sequence of tokens to text, in parts. Each part is returned as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int] = ()):
        """`tokens`: the tokens before the text."""
        self._tokenizer, self._decode, self._tokens = tokenizer, tokenizer.decode, list(tokens)
        self._first, self._told = max(0, len(self._tokens) - 8), len(self._tokens)

    def add(self, token: int) -> str:
        """Adds `token` and returns the text that it completes."""
        self._tokens.append(token)
        complete = self._text()
        if complete.endswith(_INCOMPLETE):
            return ""
        # Keep the last part as context: a token's text may depend on its predecessors, because decoding removes a space
        # at the beginning of a text.
        self._first, self._told = self._told, len(self._tokens)
        return complete

    def end(self) -> str:
        """Returns the rest of the text, including incomplete characters."""
        return self._text()

    def is_cut(self) -> bool:
        """Returns whether the text ends within a character, so that further bytes could complete the character."""
        known = [token for token in self._tokens[self._told :] if token < self._tokenizer.vocab_size]
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(b"".join(map(self._tokenizer.token_bytes, known)))
        except UnicodeDecodeError:
            return False
        return bool(decoder.getstate()[0])

    def _text(self) -> str:
        before = self._decode(self._tokens[self._first : self._told])
        return self._decode(self._tokens[self._first :])[len(before) :]

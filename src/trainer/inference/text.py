"""Prompts to tokens, and tokens to text as they come."""

from collections.abc import Callable, Sequence
from typing import Any

from trainer.config import UserError
from trainer.data.text import mended
from trainer.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # the text of bytes that are no complete character yet


def tokens_of(prompt: str, tokenizer: Tokenizer, begin: Sequence[int], longest: int, say: Callable[[str], None]) -> Any:
    """The tokens of `prompt` after those of `begin`.

    Raises:
      UserError: there are none, or more than `longest`.
    """
    text, replaced = mended(prompt)
    if replaced:
        say(f"prompt: lone surrogates are replaced by U+FFFD: {replaced}")
    tokens = [*begin, *tokenizer.encode(text)]
    if not tokens:
        raise UserError("the prompt is empty, and the tokenizer has no token for the beginning of a document")
    if len(tokens) > longest:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, at most {longest} are possible: max_prefill_predict_length, and "
            "max_target_length for prompt and continuation together; shorten it, or increase them"
        )
    return tokens


class TextStream:
    """The text of a sequence of tokens, in parts: each as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int] = ()):
        """`tokens`: come before the text."""
        self._decode, self._tokens = tokenizer.decode, list(tokens)
        self._first, self._told = max(0, len(self._tokens) - 8), len(self._tokens)

    def add(self, token: int) -> str:
        """The text that `token` completes."""
        self._tokens.append(token)
        found = self._text()
        if found.endswith(_INCOMPLETE):
            return ""
        # A token's text may depend on the tokens before it: a tokenizer removes a space at the beginning.
        self._first, self._told = self._told, len(self._tokens)
        return found

    def end(self) -> str:
        """The rest of the text, with incomplete characters."""
        return self._text()

    def _text(self) -> str:
        before = self._decode(self._tokens[self._first : self._told])
        return self._decode(self._tokens[self._first :])[len(before) :]

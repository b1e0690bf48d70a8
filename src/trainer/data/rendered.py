"""Texts rendered by a chat template, and their tokens with the ranges of characters that the tokens cover."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Range = tuple[int, int]  # character indices [start, stop)


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
      text: the text.
      learnt: the ranges inside `{% generation %}` blocks, in order; their tokens contribute to the loss.
      plain: the ranges in which a message contains the name of a special token; there, the name is ordinary text.
    """

    text: str
    learnt: tuple[Range, ...] = ()
    plain: tuple[Range, ...] = ()


class Encoded(NamedTuple):
    """The tokens of a text, int32 [n], and for each token the range [start, stop) of the characters that it covers at
    least in part."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, ids: Any, starts: Any, stops: Any) -> "Encoded":
        """Returns an instance with the arguments as arrays."""
        return cls(*(np.asarray(values, np.int32).reshape(-1) for values in (ids, starts, stops)))

    @classmethod
    def joined(cls, encoded: Sequence["Encoded"]) -> "Encoded":
        """Returns the concatenated tokens."""
        return cls(*map(np.concatenate, zip(*encoded, strict=True))) if encoded else cls.of([], [], [])

    def within(self, ranges: Sequence[Range]) -> np.ndarray:
        """Returns whether each token covers a character in one of `ranges`: bool [n]."""
        mask = np.zeros(len(self.ids), bool)
        for start, stop in ranges:
            mask |= (self.starts < stop) & (self.stops > start)
        return mask


def pattern(names: Collection[str]) -> re.Pattern[str]:
    """Returns a regular expression that matches any of `names` and prefers longer names. Without names, it matches
    nothing."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def at_plain_names(rendered: Rendered) -> Iterator[tuple[str, int, bool]]:
    """Splits the text at the ranges in `Rendered.plain`. Yields each part with its start and whether it is one of these
    ranges."""
    return _cut(rendered.text, rendered.plain)


def at_special_tokens(rendered: Rendered, names: re.Pattern[str]) -> Iterator[tuple[str, int, bool]]:
    """Splits the text at the names of special tokens outside of messages. Yields each part with its start and whether
    it is such a name. `names` matches the names of special tokens."""
    plain = set(rendered.plain)
    return _cut(rendered.text, [span for match in names.finditer(rendered.text) if (span := match.span()) not in plain])


def _cut(text: str, ranges: Sequence[Range]) -> Iterator[tuple[str, int, bool]]:
    end = 0
    for start, stop in ranges:
        if start > end:
            yield text[end:start], end, False
        yield text[start:stop], start, True
        end = stop
    if end < len(text):
        yield text[end:], end, False


def from_bytes(text: str, start: int, ids: Sequence[int], ends: Sequence[int]) -> Encoded:
    """Returns the tokens `ids` of `text`, which is the part of a longer text that begins at index `start`. The ranges
    of the tokens refer to the longer text. `ends`: the byte offset in `text` at which each token ends."""
    widths = [len(char.encode()) for char in text] if not text.isascii() else [1] * len(text)
    char_of_byte = np.repeat(np.arange(len(text)), widths)
    stops = np.asarray(ends, np.int64)
    starts = np.concatenate([[0], stops])[:-1]
    last = len(char_of_byte) - 1
    return from_offsets(
        ids,
        np.stack([char_of_byte[np.minimum(starts, last)], char_of_byte[np.clip(stops - 1, 0, last)] + (stops > 0)], 1),
        start,
    )


def from_offsets(ids: Sequence[int], offsets: Any, start: int) -> Encoded:
    """Returns the tokens `ids` of the part of a longer text that begins at index `start`. The ranges of the tokens
    refer to the longer text. `offsets` [n, 2]: the ranges of the tokens within the part.

    A token that is only a fragment of a character may have an empty range, which is extended to the end of the next
    nonempty range.
    """
    starts, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T.copy()
    for i in reversed(np.flatnonzero(stops[:-1] <= starts[:-1])):
        stops[i] = max(stops[i + 1], starts[i])
    return Encoded.of(ids, starts + start, stops + start)

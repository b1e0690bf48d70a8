"""Makes the rows for a prefill. Each row has one prompt or several prompts, and is padded to one of a few lengths."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainer.config.errors import UserError

_SMALLEST = 16  # the smallest length that prompts are padded to


class Packed(NamedTuple):
    """Several prompts in one padded row: the arguments of `Engine.prefill_concat`, named as in MaxText.

    Attributes:
      padded_tokens: int32 [t].
      decoder_positions: int32 [t]; the position of each token in its prompt.
      decoder_segment_ids: int32 [t]; positive and different for each prompt, 0 for padding.
      start_pos: int32 [prompts] or longer; the index in the row at which each prompt begins.
      true_lengths: int32 [prompts] or longer; the number of tokens of each prompt.
      num_prompts: the number of prompts.
    """

    padded_tokens: np.ndarray
    decoder_positions: np.ndarray
    decoder_segment_ids: np.ndarray
    start_pos: np.ndarray
    true_lengths: np.ndarray
    num_prompts: int


class Rows:
    """Makes rows from prompts with up to `longest` tokens, whose ids are below `vocab_size`.

    The attribute `buckets` lists the possible lengths of rows: powers of two, followed by `longest` rounded up to a
    multiple of `multiple`.
    """

    def __init__(self, longest: int, vocab_size: int, multiple: int = 1, multiple_of_starts: int = 1):
        """`multiple`: buckets are multiples of this power of two. `multiple_of_starts`: prompts that share a row begin
        at multiples of this number."""
        self._longest, self._vocab_size, self._starts = longest, vocab_size, multiple_of_starts
        self.buckets = [max(_SMALLEST, multiple)]
        while self.buckets[-1] < longest:
            self.buckets.append(2 * self.buckets[-1])
        self.buckets[-1] = longest + -longest % multiple

    def padded(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns `tokens`, padded to the next bucket: int32 [bucket].

        Raises:
          ValueError: there are no tokens, or too many.
          UserError: a token is not an id of the vocabulary.
        """
        if not 0 < len(tokens) <= self._longest:
            raise ValueError(f"a prompt has 1 to {self._longest} tokens; {len(tokens)} were given")
        ids = self.checked(tokens)
        row = np.zeros(next(size for size in self.buckets if size >= len(tokens)), np.int32)
        row[: len(tokens)] = ids
        return row

    def checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns `tokens` as an array. Raises UserError if a token is not an id of the vocabulary."""
        ids = np.asarray(tokens)
        wrong = ids[(ids < 0) | (ids >= self._vocab_size)] if ids.dtype.kind in "iu" else ids
        if wrong.size:
            raise UserError(f"the prompt has the token {wrong[0]}: allowed: integers from 0 to {self._vocab_size - 1}")
        return ids

    def packed(self, prompts: Sequence[Sequence[int]]) -> Packed:
        """Returns several prompts as one row, padded to the next bucket.

        Raises:
          ValueError: there is no prompt, a prompt has no tokens, or the prompts together have too many tokens.
          UserError: see `padded`.
        """
        if not prompts or not all(map(len, prompts)):
            raise ValueError("a prompt has at least one token, and there is at least one prompt")
        lengths = np.asarray(list(map(len, prompts)), np.int32)
        room = lengths + -lengths % self._starts
        starts = np.cumsum(room, dtype=np.int32) - room
        index = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths, strict=True)])
        ids = np.concatenate(prompts)
        row = np.zeros(index[-1] + 1, ids.dtype)
        row[index] = ids
        tokens = self.padded(row)
        positions, segments = np.zeros((2, tokens.size), np.int32)
        positions[index] = np.concatenate(list(map(np.arange, lengths)))
        segments[index] = np.repeat(np.arange(lengths.size) + 1, lengths)
        return Packed(
            padded_tokens=tokens,
            decoder_positions=positions,
            decoder_segment_ids=segments,
            start_pos=starts,
            true_lengths=lengths,
            num_prompts=len(prompts),
        )

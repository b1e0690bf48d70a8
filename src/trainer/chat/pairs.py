"""Encodes pairs of answers as documents for preference optimization. `data.open_dataset` uses this encoder.

The document of a pair is the chosen sequence, followed by the rejected one. Each sequence consists of a prompt and an
answer; only the tokens of the answer contribute to the loss. Conversations are rendered by the chat template; texts are
encoded unchanged.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from trainer.chat.conversations import Preference, preference
from trainer.chat.encoder import SHOWN, ChatEncoder, Example, count_replaced, open_formatter, open_template
from trainer.chat.turns import Turns
from trainer.config.keys import Config
from trainer.config.words import visible
from trainer.data.dataset import alignment
from trainer.data.documents import Counts, Document, Record
from trainer.data.rendered import Encoded, Rendered, pattern
from trainer.data.tokenizer import Tokenizer

_FORMAT = 1  # increment it when the tokens or masks of the same pair change


class Pair(NamedTuple):
    """The two sequences of a record."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True)
class PairEncoder(ChatEncoder):
    """An `Encoder` of pairs of answers.

    Attributes:
      row: the number of tokens of a row, which contains both sequences of a pair.
      align: each sequence begins at a multiple of this many tokens.
      truncate: whether pairs that are too long are truncated instead of skipped.
      longest_prompt: the maximum number of tokens in a prompt. If None, prompts are truncated only in pairs longer than
        a row.
    """

    noun: ClassVar[str] = "pair"

    row: int
    align: int
    truncate: bool
    longest_prompt: int | None

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"pairs": _FORMAT}

    def encode(self, records: Sequence[Record], counts: Counts) -> list[Document | None]:
        """See `Encoder.encode`. Skips pairs that are too long, pairs of equal answers, and pairs in which an answer
        has no trained tokens.

        Raises:
          UserError: a record is not a pair, or the template cannot render it; the error names the record.
        """
        pairs = zip(self.pairs(records, counts), records, strict=True)
        return [pair and self.pair_document(pair, counts, record) for pair, record in pairs]

    def lengths(self, records: Sequence[Record], counts: Counts) -> Iterator[int]:
        """Yields the number of row positions that each pair in `records` needs without truncation."""
        return (self._places(pair) for pair in self.pairs(records, counts) if pair)

    def _places(self, pair: Pair) -> int:
        return _document(_parts(pair)).places(self.align)

    def pairs(self, records: Sequence[Record], counts: Counts) -> list[Pair | None]:
        """Returns the encoded pair of each record; None for a record with an empty prompt or answer. Errors are as in
        `encode`."""
        pairs: list[Pair | None] = []
        for record in records:
            found, replaced = preference(record, self.columns, self.formatter)
            count_replaced(replaced, record, counts)
            if not found.chosen:
                _count_skipped("a prompt or an answer is empty", str(record.where), record, counts)
                pairs.append(None)
            elif isinstance(found.chosen, str):
                pairs.append(self._of_texts(found, record, counts))
            else:
                pairs.append(self._of_messages(found, record, counts))
        return pairs

    def _of_messages(self, found: Preference, record: Record, counts: Counts) -> Pair:
        sides = [
            self.turns(messages, found.tools, record, counts, found.prompt)  # type: ignore[arg-type]
            for messages in (found.chosen, found.rejected)
        ]
        return Pair(*self.encoded(sides))

    def _of_texts(self, found: Preference, record: Record, counts: Counts) -> Pair:
        """Returns the pair of two texts. Each text is encoded between the tokenizer's BOS and EOS tokens, and the
        prompt is the common prefix of both token sequences."""
        names = pattern(self._tokenizer.special_tokens)
        texts = [str(found.chosen), str(found.rejected)]
        rendered = [Rendered(text, plain=tuple(match.span() for match in names.finditer(text))) for text in texts]
        sides = [self._between(one.encoded) for one in self.encoded([Turns(one, [], [], 0) for one in rendered])]
        same = _shared(sides[0].ids, sides[1].ids)
        counts.bytes += sum(len(text.encode()) for text in texts)
        examples = []
        for text, encoded in zip(rendered, sides, strict=True):
            self.notice_plain(text, record, counts)
            start = int(encoded.starts[same]) if same < len(encoded.ids) else len(text.text)
            learnt = np.arange(len(encoded.ids)) >= same
            examples.append(Example(Turns(text, [(start, len(text.text))], [], 0), encoded, learnt))
        return Pair(*examples)

    def _between(self, encoded: Encoded) -> Encoded:
        end = int(encoded.stops.max(initial=0))
        before, after = (
            Encoded.of([] if token is None else [token], *([[at]] * 2 if token is not None else [[], []]))
            for token, at in ((self._tokenizer.bos, 0), (self._tokenizer.eos, end))
        )
        return Encoded.joined([before, encoded, after])

    def pair_document(self, pair: Pair, counts: Counts, record: Record) -> Document | None:
        """Returns the document of a pair. If the pair is skipped, counts the reason and returns None."""
        for side in pair:
            self.notice_crossing(side, counts, record)
        parts = _parts(pair)
        fitting = self._fitting(parts)
        if fitting is not None:
            problem = _problem(fitting)
        elif (tokens := self._places(pair)) <= self.row:
            problem = f"their prompts have more than {self.longest_prompt} tokens (use_truncation=false)"
        else:
            problem = "their prompts leave no space in a row for answers"
            if not self.truncate:
                problem = f"they are longer than max_target_length={self.row} (use_truncation=false)"
            counts.long(tokens)
        if fitting is None or problem:
            texts = [side.turns.rendered.text for side in pair]
            _count_skipped(problem, visible("\n".join(text[:SHOWN] for text in texts)), record, counts)
            return None
        if lost := sum(len(part.ids) for part in parts) - sum(len(part.ids) for part in fitting):
            counts.cut += 1
            counts.cut_tokens += lost
        counts.documents += 1
        return _document(fitting)

    def kept(self, pair: Pair) -> list[np.ndarray]:
        """Returns, for each of the two sequences, a mask of the tokens that remain after truncation: bool [n]. If the
        pair is skipped, both masks are all False."""
        found = [np.zeros(len(side.learnt), bool) for side in pair]
        fitting = self._fitting(_parts(pair))
        if fitting is not None and not _problem(fitting):
            for numbers, part in zip(found, fitting, strict=True):
                numbers[part.numbers] = True
        return found

    def _fitting(self, parts: "list[_Part]") -> "list[_Part] | None":
        """Returns the two sequences, truncated if necessary so that they fit into a row.

        Prompts that are too long lose their first tokens. If the sequences are still too long, answers lose their last
        tokens; the maximum length is the same for both answers. Returns None if the sequences are too long and
        truncation is off, or if no token of an answer would remain.
        """
        prompts = [part.prompt for part in parts]
        fits = _document(parts).places(self.align) <= self.row
        limit = self.longest_prompt
        if limit is None and not fits:
            limit = max(1, self.row // 4)
        if limit is not None and max(prompts) > limit:
            if not self.truncate:
                return None
            parts = [part.with_prompt(limit, self._first) for part in parts]
            fits = _document(parts).places(self.align) <= self.row
        if fits:
            return parts
        if not self.truncate:
            return None

        def cut(most: int) -> list[_Part]:
            return [part.with_answer(most) for part in parts]

        answers = range(1, max(len(part.ids) - part.prompt for part in parts) + 1)
        most = bisect.bisect_right(answers, self.row, key=lambda most: _document(cut(most)).places(self.align))
        return cut(most) if most else None

    @property
    def _first(self) -> int | None:
        """The BOS token, which truncation keeps at the beginning of a prompt; None if the tokenizer has none."""
        return self._tokenizer.special_tokens.get(self._tokenizer.special_names.get("bos_token", ""))


def _count_skipped(problem: str, text: str, record: Record, counts: Counts) -> None:
    counts.skipped += 1
    counts.notice(f"skipped: {problem}", lambda: f"pairs are skipped: {problem}; the first in {record.where}")
    counts.unlearnt = counts.unlearnt or text


def _parts(pair: Pair) -> "list[_Part]":
    return [_Part(side.encoded.ids, side.learnt, np.arange(len(side.learnt))) for side in pair]


class _Part(NamedTuple):
    """One sequence of a pair: its tokens, a mask of the trained tokens, and the tokens' indices before truncation. Each
    array is [n]."""

    ids: np.ndarray
    learnt: np.ndarray
    numbers: np.ndarray

    @property
    def prompt(self) -> int:
        """The number of tokens before the first trained token."""
        return int(np.argmax(self.learnt)) if self.learnt.any() else len(self.learnt)

    def with_prompt(self, most: int, first: int | None) -> "_Part":
        """Returns the part with only the last `most` prompt tokens. If the part begins with the token `first`, the
        result does, too."""
        kept = np.arange(max(0, self.prompt - most), len(self.ids))
        if kept[0] and self.ids[0] == first:
            kept[0] = 0
        return self._of(kept)

    def with_answer(self, most: int) -> "_Part":
        """Returns the part with at most `most` answer tokens."""
        return self._of(slice(self.prompt + most))

    def _of(self, kept: "np.ndarray | slice") -> "_Part":
        return _Part(*(values[kept] for values in self))


def _document(parts: Sequence[_Part]) -> Document:
    chosen, rejected = (Document(part.ids, part.learnt[1:]) for part in parts)
    return chosen._replace(after=(rejected,))


def _problem(parts: Sequence[_Part]) -> str:
    """Returns the reason to skip a pair of sequences; "" if the pair can be used for training."""
    if np.array_equal(parts[0].ids, parts[1].ids):
        return "their answers are equal within a row"
    if not all(part.learnt[1:].any() for part in parts):
        return "one of the answers has no trained tokens within a row"
    return ""


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the length of the common prefix of two token sequences."""
    shortest = min(len(one), len(other))
    different = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(different[0]) if len(different) else shortest


def pair_encoder(config: Config, tokenizer: Tokenizer | None, columns: tuple[str, ...], tokenize: bool) -> PairEncoder:
    """Returns the encoder of pairs for `data.open_dataset`. Also sets the tokenizer's template.

    Raises:
      UserError: the template or the formatting function does not exist or is not valid.
    """
    assert tokenizer is not None
    return PairEncoder(
        tokenizer,
        columns,
        tokenize,
        completion_only=True,
        vocab_size=config.vocab_size,
        template=open_template(config, tokenizer),
        formatter=open_formatter(config),
        longest=None,
        row=config.max_target_length,
        align=alignment(config),
        truncate=config.use_truncation,
        longest_prompt=config.dpo_max_prompt_length,
    )

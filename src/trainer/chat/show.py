"""Prints conversations and pairs of answers as a run would train on them."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.chat.encoder import ChatEncoder, Example, chat_encoder
from trainer.chat.pairs import PairEncoder, pair_encoder
from trainer.config.keys import Config
from trainer.config.words import TRAINED_COLOUR, TRAINED_PLAIN, counted, visible
from trainer.data import prepare
from trainer.data.cache import cache_root
from trainer.data.documents import Counts, Record
from trainer.data.sources import open_source

Say = Callable[[str], None]


def conversations(config: Config, count: int, say: Say) -> None:
    """Prints the first `count` conversations of the training data, then passes notes about them to `say`. Trained text
    is in colour on a terminal, and otherwise in guillemets.

    Raises:
      UserError: in the same cases as training.
    """

    def shown(encoder: ChatEncoder, record: Record, counts: Counts) -> str:
        (example,) = encoder.examples([record], counts)
        if example is None:
            return f"---- {record.where}: no messages\n"
        kept = np.full(len(example.learnt), encoder.document(example, counts, record) is not None)
        if encoder.longest is not None:
            kept[encoder.longest + 1 :] = False
        skipped = "" if kept.any() else "skipped; "
        return f"---- {record.where}: {skipped}{_facts(example, kept)}\n{_marked(example, kept)}\n"

    _show(config, count, say, chat_encoder, shown)


def pairs(config: Config, count: int, say: Say) -> None:
    """Prints the first `count` preference pairs in the same way as `conversations`. Prints two texts for each pair: the
    prompt with the chosen answer, then the prompt with the rejected answer."""

    def shown(encoder: PairEncoder, record: Record, counts: Counts) -> str:
        (pair,) = encoder.pairs([record], counts)
        if pair is None:
            return f"---- {record.where}: an answer or a prompt is empty\n"
        document = encoder.pair_document(pair, counts, record)
        what = "skipped"
        if document is not None:
            what = f"{document.places(encoder.align)} of the {encoder.row} tokens of a row"
        lines = [f"---- {record.where}: {what}"]
        for name, side, kept in zip(("chosen", "rejected"), pair, encoder.kept(pair), strict=True):
            lines.append(f"{name}: {_facts(side, kept)}\n{_marked(side, kept)}\n")
        return "\n".join(lines)

    _show(config, count, say, pair_encoder, shown)


def _show(config: Config, count: int, say: Say, make_encoder: Any, shown: Callable[..., str]) -> None:
    source = open_source(config, say)
    tokenizer = prepare.open_tokenizer(
        config, source.train, source.weights, cache_root(config.data_cache_directory), say
    )
    records = itertools.chain.from_iterable(corpus.records() for corpus in source.train)
    encoder = make_encoder(config, tokenizer, source.train[0].columns, config.tokenize_train_data)
    counts = Counts(noun=encoder.noun)
    learnt = "green" if _marks() is TRAINED_COLOUR else " ".join(TRAINED_PLAIN)
    say(f"template: {encoder.template.where}; trained text is {learnt}")
    for record in itertools.islice(records, count):
        print(shown(encoder, record, counts))
    for note in counts.notes():
        say(note)


def _marks() -> tuple[str, str]:
    return TRAINED_COLOUR if sys.stdout.isatty() else TRAINED_PLAIN


def _facts(example: Example, kept: np.ndarray) -> str:
    """Returns a text with three numbers for a sequence: all tokens, truncated tokens (if any), and trained tokens.
    `kept`: whether each token is in the row, bool [n]; all false if the sequence is skipped."""
    lost = int((~kept).sum())
    cut = f", {lost:,} of them cut" if lost and kept.any() else ""
    return f"{counted(len(kept), 'token')}{cut}, {int(example.learnt[kept][1:].sum()):,} learnt"


def _marked(example: Example, kept: np.ndarray) -> str:
    """Returns the text of a sequence with marks around trained characters. In place of a truncated part, the text
    contains the number of the part's tokens."""
    marks, skipped = _marks(), not kept.any()
    text, encoded = example.turns.rendered.text, example.encoded
    parts, end = [], 0
    states = zip(example.learnt & kept, kept | skipped, encoded.stops, strict=True)
    for (is_learnt, is_there), group in itertools.groupby(states, lambda state: state[:2]):
        stops = [int(stop) for *_, stop in group]
        start, end = end, max(end, *stops)
        part = visible(text[start:end]) if is_there else f"[{counted(len(stops), 'token')} cut]"
        parts.append(f"{marks[0]}{part}{marks[1]}" if is_learnt and part else part)
    return "".join([*parts, visible(text[end:])])

"""Prints conversations as a run of supervised fine-tuning would learn them."""

import itertools
import sys
from collections.abc import Callable

from trainer.config import Config
from trainer.config.words import counted, visible
from trainer.data import prepare
from trainer.data.cache import cache_root
from trainer.data.documents import Counts
from trainer.data.sources import open_source
from trainer.post_training.chat_encoder import ChatEncoder, Example, chat_encoder

_COLOUR, _PLAIN = ("\x1b[1;32m", "\x1b[0m"), ("\u00ab", "\u00bb")


def show(config: Config, count: int, say: Callable[[str], None]) -> None:
    """Prints the first `count` conversations of the training data, with what is learnt in colour, or in guillemets if
    standard output is not a terminal; then notes on them to `say`.

    Raises:
      UserError: as the run would.
    """
    source = open_source(config, say)
    tokenizer = prepare.open_tokenizer(
        config, source.train, source.weights, cache_root(config.data_cache_directory), say
    )
    counts, marks = Counts(), _COLOUR if sys.stdout.isatty() else _PLAIN
    records = itertools.chain.from_iterable(corpus.records() for corpus in source.train)
    encoder = chat_encoder(config, tokenizer, source.train[0].columns, config.tokenize_train_data)
    say(f"template: {encoder.template.where}; what is learnt is {'green' if marks is _COLOUR else ' '.join(marks)}")
    for record in itertools.islice(records, count):
        (example,) = encoder.examples([record], counts)
        if example is None:
            print(f"---- {record.where}: no messages\n")
            continue
        encoder.document(example, counts, record)
        print(f"---- {record.where}: {_facts(encoder, example)}\n{_marked(example, marks)}\n")
    for note in counts.notes():
        say(note)


def _facts(encoder: ChatEncoder, example: Example) -> str:
    targets, learnt = len(example.learnt) - 1, int(example.learnt[1:].sum())
    facts = f"{counted(targets + 1, 'token')}, {learnt} learnt"
    if encoder.longest is not None and targets > encoder.longest:
        facts += (
            f"; cut after the first {encoder.longest}, with {int(example.learnt[1 : encoder.longest + 1].sum())} learnt"
        )
    return facts


def _marked(example: Example, marks: tuple[str, str]) -> str:
    """Returns the text with marks around the characters whose tokens are learnt."""
    text, encoded = example.turns.rendered.text, example.encoded
    parts, end = [], 0
    for is_learnt, group in itertools.groupby(zip(example.learnt, encoded.stops, strict=True), lambda pair: pair[0]):
        start, end = end, max(end, *(int(stop) for _, stop in group), 0)
        part = visible(text[start:end])
        parts.append(f"{marks[0]}{part}{marks[1]}" if is_learnt and part else part)
    return "".join([*parts, visible(text[end:])])

"""Opens the documents that the configuration selects, and prepares their rows."""

from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.keys import Config
from trainer.data.dataset import MakeEncoder, Say, alignment, no_evaluation, words
from trainer.data.documents import Encoder
from trainer.data.packing import Packing
from trainer.data.parts import Cut
from trainer.data.prepare import FORMAT, Rows, open_rows, open_tokenizer
from trainer.data.prepared import Prepared, short
from trainer.data.sources import Source, open_source
from trainer.data.tokenizer import Tokenizer


class Opened(NamedTuple):
    """Documents and everything needed to make rows from them.

    Attributes:
      evaluation: the held-out rows; None if eval_interval disables evaluation.
      cut: how the preparation of the training rows is divided into parts and processes.
      root: the folder for trained tokenizers and prepared rows.
    """

    source: Source
    tokenizer: Tokenizer | None
    encoder: Encoder
    packing: Packing
    evaluation: Rows | None
    cut: Cut
    root: Path

    def identity(self, way: str) -> dict[str, Any]:
        """Returns the entries of `Dataset.identity` except `order`. `way`: the value of data_pipeline."""
        encoder, source = self.encoder, self.source
        facts = [[corpus.identity for corpus in source.train], encoder.identity | {"tokenizer": None}]
        return {
            "format": FORMAT,
            "way": way,
            "documents": f"{short(facts)}, weights {':'.join(map(str, source.weights))}",
            "tokenizer": short(encoder.tokenizer.fingerprint) if encoder.tokenizer else None,
            "length": self.packing.length,
            # `Packing.identity` contains every field of `Packing`, so every packing setting is part of the identity.
            "packing": words(self.packing.identity),
        }

    def prepare(self, say: Say) -> Prepared:
        """Returns the training rows. Prepares them unless an earlier run has already stored them."""
        source, identity = self.source, self.identity("prepared")
        settings: Any = (self.encoder, self.packing, "train", self.root, say, self.cut)
        train = [open_rows([corpus], *settings) for corpus in source.train]
        if any("parts" in rows.meta for rows in train):
            identity["packing"] += f", parts of {self.cut.size:,} bytes"
        labels, noun = [corpus.name for corpus in source.train], self.encoder.noun
        own: Any = (self.evaluation, noun, self.encoder.limit, identity)
        return Prepared(source.name, labels, source.weights, train, *own)


def open_documents(config: Config, root: Path, say: Say, make_encoder: MakeEncoder, beam: str | None = None) -> Opened:
    """Opens the documents and the tokenizer, and prepares the held-out rows. A newly trained tokenizer and newly
    prepared rows are stored in `root`. `beam`: see `Cut`.

    Raises UserError if a key is invalid, a file or prepared folder is missing or damaged, or `root` cannot be written.
    """
    source = open_source(config, say)
    tokenizer = open_tokenizer(config, source.train, source.weights, root, say)
    packing = Packing(
        config.max_target_length,
        config.grain_packing_type,
        config.packing,
        config.max_segments_per_seq,
        config.use_truncation,
        alignment(config),
    )
    cut = Cut(round(config.prepare_part_mib * 2**20), config.prepare_workers, beam)
    evaluation = None
    if config.eval_interval > 0:
        if not source.evaluation:
            raise no_evaluation(config)
        first = source.evaluation[0]
        tokenize = config.tokenize_train_data if first.evaluates else config.tokenize_eval_data
        encoder = make_encoder(config, tokenizer, first.columns, tokenize)
        evaluation = open_rows(source.evaluation, encoder, packing, "held-out", root, say, cut)
    encoder = make_encoder(config, tokenizer, source.train[0].columns, config.tokenize_train_data)
    return Opened(source, tokenizer, encoder, packing, evaluation, cut, root)

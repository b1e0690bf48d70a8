"""Opens the data of a run from its configuration: training batches, held-out rows, the tokenizer."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.capabilities.invariant_keys import TILE
from trainer.config.capabilities.token_keys import token_files
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.data.batches import RowSource
from trainer.data.streams import Position, PreparedStream, RepeatedStream, Stream, StreamingStream, fingerprint
from trainer.data.synthetic import EVAL_OFFSET, EVAL_ROWS, SyntheticRows
from trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trainer.data.corpus import Corpus
    from trainer.data.documents import Encoder
    from trainer.data.packing import Packing
    from trainer.data.sources import Source

Say = Callable[[str], None]


class Epoch(NamedTuple):
    """One pass over the training data: the number of rows or prompts, and their content in words."""

    rows: int
    content: str


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Attributes:
      evaluation: held-out rows; None if eval_interval disables evaluation.
      tokenizer: None for synthetic rows, and for token ids without a tokenizer_path.
      identity: everything that determines the training batches and their order, by name; included in every position.
      summary: one line for users.
      repeats: whether training repeats the first batch of the stream forever.
      epoch: one pass; None if the data are endless or their length is unknown.
    """

    evaluation: RowSource | None
    tokenizer: Tokenizer | None
    identity: dict[str, Any]
    summary: str
    open_stream: Callable[..., Stream]
    repeats: bool = False
    epoch: Epoch | None = None

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal training batches in equal order."""
        return fingerprint(self.identity)

    def train_stream(
        self, position: Position | None = None, *, rows: int, process_index: int = 0, process_count: int = 1
    ) -> Stream:
        """Returns this process's part of the endless stream of global batches of `rows` rows, starting at `position`.

        Each position continues exactly after its batch, also in another stream of an equal data set. Raises UserError
        if the position belongs to other data, or cannot be resumed on this number of processes.
        """
        share = {"process_index": process_index, "process_count": process_count}
        stream = self.open_stream(identity=self.identity, position=position, rows=rows, **share)
        return RepeatedStream(stream) if self.repeats else stream

    @functools.cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """See `Tokenizer.saved_files`; {} without a tokenizer."""
        return {} if self.tokenizer is None else self.tokenizer.saved_files()

    def __str__(self) -> str:
        return self.summary


def text_encoder(config: Config, tokenizer: Tokenizer | None, columns: tuple[str, ...], tokenize: bool) -> "Encoder":
    """Returns the encoder for documents with one column, or with a prompt and its completion."""
    from trainer.data.documents import Encoder

    return Encoder(tokenizer, columns, tokenize, config.sft_train_on_completion_only, config.vocab_size)


MakeEncoder = Callable[[Config, Tokenizer | None, tuple[str, ...], bool], "Encoder"]


def open_dataset(config: Config, say: Say, make_encoder: MakeEncoder = text_encoder) -> Dataset:
    """Opens the data of `dataset_type`. Prepares them first if necessary, with progress lines to `say`.

    `make_encoder` returns the encoder of records, given the configuration, the tokenizer, the columns, and whether the
    columns contain text instead of token ids.

    Raises UserError if keys, a file, the disk or an earlier prepared folder prevent it.
    """
    if config.dataset_type == "synthetic":
        dataset = _synthetic(config)
    else:
        dataset = _of_tokens(config, say) if token_files(config) else _of_documents(config, say, make_encoder)
    if not config.reuse_example_batch:
        return dataset
    return dataclasses.replace(
        dataset,
        identity=dataset.identity | {"order": f"{dataset.identity['order']}, the first batch again and again"},
        summary=f"{dataset.summary}; reuse_example_batch: trains on the first batch only",
        repeats=True,
        epoch=None,
    )


def _of_documents(config: Config, say: Say, make_encoder: MakeEncoder) -> Dataset:
    # Imported late, because synthetic runs need no tokenizer.
    from trainer.data import prepare
    from trainer.data.cache import cache_root
    from trainer.data.packing import Packing
    from trainer.data.sources import open_source

    source, root = open_source(config, say), cache_root(config.data_cache_directory)
    tokenizer = prepare.open_tokenizer(config, source.train, source.weights, root, say)
    packing = Packing(
        config.max_target_length,
        config.grain_packing_type,
        config.packing,
        config.max_segments_per_seq,
        config.use_truncation,
        alignment(config),
    )

    def encoder(corpus: "Corpus", tokenize: bool) -> "Encoder":
        return make_encoder(config, tokenizer, corpus.columns, tokenize)

    evaluation, held_out = None, "no evaluation"
    if config.eval_interval > 0:
        if not source.evaluation:
            raise _no_evaluation(config)
        first = source.evaluation[0]
        encode = encoder(first, config.tokenize_train_data if first.evaluates else config.tokenize_eval_data)
        evaluation, meta = prepare.open_rows(source.evaluation, encode, packing, "held-out", root, say)
        held_out = f"held out {_facts(meta, encode.noun, 'evaluated')}"
    encode = encoder(source.train[0], config.tokenize_train_data)
    order, epoch = _order(config), None
    if config.data_pipeline == "streaming":
        facts = "tokenized and packed while it trains"
        open_stream = _streamed(source, encode, packing, order, config.grain_worker_count, say)
    else:
        open_stream, facts, epoch = _prepared(source, encode, packing, order, root, say)
    return Dataset(
        evaluation,
        tokenizer,
        _identity(config, source, encode, packing, order),
        f"{source.name}: {facts}; {held_out} ({root})",
        open_stream,
        epoch=epoch,
    )


def _of_tokens(config: Config, say: Say) -> Dataset:
    """Returns rows that are read directly from files of token ids."""
    from trainer.data import megatron, prepare
    from trainer.data.cache import cache_root
    from trainer.data.mixture import whole_weights

    root = cache_root(config.data_cache_directory)
    tokenizer = prepare.open_tokenizer(config, (), (), root, say)
    train, fractions, evaluation, documents = megatron.open_files(config, say)
    if config.eval_interval > 0 and evaluation is None:
        raise _no_evaluation(config)
    weights, order = whole_weights(fractions), _order(config)
    facts = [_facts(vars(rows)) for rows in train]
    held_out = f"held out {_facts(vars(evaluation), tokens='evaluated')}" if evaluation else "no evaluation"
    identity = {
        "format": prepare.FORMAT,
        "way": config.data_pipeline,
        "documents": f"{_short([documents, config.vocab_size])}, weights {':'.join(map(str, weights))}",
        "tokenizer": _short(tokenizer.fingerprint) if tokenizer else None,
        "length": config.max_target_length,
        "packing": _words(megatron.boundaries(config)),
        "order": _order_words(config, order),
    }
    summary = f"{config.grain_file_type} files {config.grain_train_files}: {' + '.join(facts)}; {held_out}"
    epoch = Epoch(train[0].size, facts[0].partition(",")[0]) if len(train) == 1 else None
    return Dataset(evaluation, tokenizer, identity, summary, _stream_of_rows(train, weights, order), epoch=epoch)


def _no_evaluation(config: Config) -> UserError:
    return UserError(
        f"eval_interval={config.eval_interval}, but the data have nothing to evaluate on: set the files or split of "
        "evaluation (grain_eval_files, eval_split, hf_eval_split, hf_eval_files), a held_out_share, or eval_interval=-1"
    )


def _synthetic(config: Config) -> Dataset:
    seed, length, vocab_size = config.data_shuffle_seed, config.max_target_length, config.vocab_size
    align = alignment(config)
    settings: dict[str, Any] = {"seed": seed, "align": align, "together": config.packing}
    train = SyntheticRows(length, vocab_size, **settings)
    evaluation = SyntheticRows(length, vocab_size, **settings, offset=EVAL_OFFSET, size=EVAL_ROWS)
    alone = "" if config.packing else ", one in a row"
    identity = {
        "way": "prepared",
        "documents": f"synthetic, vocab_size {vocab_size}" + (f", align {align}" if align > 1 else "") + alone,
        "length": length,
        "order": f"seed {seed}",
    }

    open_stream = functools.partial(PreparedStream, train, seed=seed, shuffle=False)
    return Dataset(evaluation, None, identity, f"synthetic rows, {EVAL_ROWS} held out", open_stream)


def alignment(config: Config) -> int:
    """Returns the number of tokens to a multiple of which each sequence in a row is aligned."""
    return TILE if config.batch_invariant else 1


def _order(config: Config) -> dict[str, Any]:
    """Returns the settings that determine the order of documents or rows, as arguments of the configured pipeline."""
    shuffle, seed, window = config.enable_data_shuffling, config.data_shuffle_seed, config.grain_shuffle_buffer_size
    if config.data_pipeline == "streaming":
        return {"seed": seed, "window": window} if shuffle else {"seed": None, "window": 1}
    return {"seed": seed if shuffle else 0, "shuffle": shuffle}


def _prepared(
    source: "Source", encoder: "Encoder", packing: "Packing", order: dict[str, Any], root: Path, say: Say
) -> tuple[Callable[..., Stream], str, Epoch | None]:
    from trainer.data import prepare

    opened = [prepare.open_rows([corpus], encoder, packing, "train", root, say) for corpus in source.train]
    facts = " + ".join(_facts(meta, encoder.noun) for _, meta in opened)
    (rows, meta), *others = opened
    epoch = None if others else Epoch(rows.size, counted(meta["documents"], encoder.noun))
    return _stream_of_rows([rows for rows, _ in opened], source.weights, order), facts, epoch


def _stream_of_rows(
    sources: Sequence[RowSource], weights: Sequence[int], order: dict[str, Any]
) -> Callable[..., Stream]:
    from trainer.data.mixture import MixedRows

    rows = sources[0] if len(sources) == 1 else MixedRows(sources, weights, **order)
    return functools.partial(PreparedStream, rows, **order)


def _streamed(
    source: "Source", encoder: "Encoder", packing: "Packing", order: dict[str, Any], workers: int, say: Say
) -> Callable[..., Stream]:
    from trainer.data.prepare import check_trainable

    for corpus in source.train:
        check_trainable(corpus, encoder, packing)

    def open_stream(*, process_index: int, process_count: int, **settings: Any) -> Stream:
        from trainer.data.streaming import streamed_rows

        part: dict[str, Any] = {"workers": workers, "process_index": process_index, "process_count": process_count}
        rows = streamed_rows(source.train, source.weights, encoder, packing, **order, **part)
        return StreamingStream(rows, say=say, **part, **settings)

    return open_stream


def _facts(meta: dict[str, Any], noun: str = "document", tokens: str = "trained") -> str:
    return f"{counted(meta['documents'], noun)}, {counted(meta['tokens'], f'{tokens} token')}"


def _identity(
    config: Config, source: "Source", encoder: "Encoder", packing: "Packing", order: dict[str, Any]
) -> dict[str, Any]:
    from trainer.data.prepare import FORMAT

    facts = [[corpus.identity for corpus in source.train], encoder.identity | {"tokenizer": None}]
    return {
        "format": FORMAT,
        "way": config.data_pipeline,
        "documents": f"{_short(facts)}, weights {':'.join(map(str, source.weights))}",
        "tokenizer": _short(encoder.tokenizer.fingerprint) if encoder.tokenizer else None,
        "length": packing.length,
        # Both contain every setting, so that none is missed.
        "packing": _words(packing.identity),
        "order": _order_words(config, order),
    }


def _order_words(config: Config, order: dict[str, Any]) -> str:
    from trainer.data.order import VERSION

    return _words(order | ({"version": VERSION} if config.enable_data_shuffling else {}))


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _short(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

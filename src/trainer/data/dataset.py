"""Opens the data of a run as the configuration specifies: training batches, held-out rows, and the tokenizer."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    from trainer.data.documents import Encoder
    from trainer.data.opened import Opened
    from trainer.data.prepare import Rows
    from trainer.data.prepared import Prepared

Say = Callable[[str], None]


class Epoch(NamedTuple):
    """One pass over the training data. `rows`: its number of rows or prompts. `content`: what these contain, in
    words."""

    rows: int
    content: str


class Component(NamedTuple):
    """A component of a mixture: its share of all rows, and the numbers of rows and trained tokens in one pass over
    it."""

    label: str
    share: float
    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Attributes:
      evaluation: held-out rows; None if eval_interval disables evaluation.
      tokenizer: None for synthetic rows, and for token ids without a tokenizer_path.
      identity: everything that determines the training batches and their order, by name; included in every `Position`.
      summary: one line for users.
      repeats: whether training repeats the first batch of the stream forever.
      epoch: one pass; None if the data are endless or their length is unknown.
      mixture: the components of a mixture of prepared rows.
      source: the training rows, from which `open_stream` makes its stream; None if `open_stream` opens the rows itself.
    """

    evaluation: RowSource | None
    tokenizer: Tokenizer | None
    identity: dict[str, Any]
    summary: str
    open_stream: Callable[..., Stream]
    repeats: bool = False
    epoch: Epoch | None = None
    mixture: Sequence[Component] = ()
    source: RowSource | None = None

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal training batches in equal order."""
        return fingerprint(self.identity)

    def train_stream(
        self, position: Position | None = None, *, rows: int, process_index: int = 0, process_count: int = 1
    ) -> Stream:
        """Returns this process's part of the endless stream of global batches of `rows` rows, starting at `position`.

        From the position of a batch, a stream continues directly after that batch, even if the position is from another
        stream of an equal data set. Raises UserError if the position belongs to other data, or cannot be resumed on
        this number of processes.
        """
        settings: Any = {"rows": rows, "process_index": process_index, "process_count": process_count}
        if self.source is not None:
            settings["source"] = self.source
        stream = self.open_stream(identity=self.identity, position=position, **settings)
        return RepeatedStream(stream) if self.repeats else stream

    @functools.cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files that `Tokenizer.saved_files` returns; {} without a tokenizer."""
        return {} if self.tokenizer is None else self.tokenizer.saved_files()

    def __str__(self) -> str:
        return self.summary


def text_encoder(config: Config, tokenizer: Tokenizer | None, columns: tuple[str, ...], tokenize: bool) -> "Encoder":
    """Returns the encoder for documents in one column, or in two columns: a prompt and its completion."""
    from trainer.data.documents import Encoder

    return Encoder(tokenizer, columns, tokenize, config.sft_train_on_completion_only, config.vocab_size)


MakeEncoder = Callable[[Config, Tokenizer | None, tuple[str, ...], bool], "Encoder"]


def open_dataset(config: Config, say: Say, make_encoder: MakeEncoder = text_encoder) -> Dataset:
    """Opens the data that `config` selects. If necessary, prepares the data first, and reports progress lines to `say`.

    `make_encoder` returns the encoder of records, given the configuration, the tokenizer, the columns, and whether the
    columns contain text instead of token ids.

    Raises UserError if keys, a file, the disk or an earlier prepared folder prevent opening the data.
    """
    if config.dataset_type == "synthetic":
        dataset = _synthetic(config)
    else:
        dataset = _of_tokens(config, say) if token_files(config) else _of_documents(config, say, make_encoder)
    if config.teacher_logits_path:
        from trainer.data.teacher_logits import with_logits

        dataset = with_logits(dataset, config.teacher_logits_path)
    if not config.reuse_example_batch:
        return dataset
    return dataclasses.replace(
        dataset,
        identity=dataset.identity | {"order": f"{dataset.identity['order']}, the first batch again and again"},
        summary=f"{dataset.summary}; reuse_example_batch: trains on the first batch only",
        repeats=True,
        epoch=None,
        mixture=(),
    )


def _of_documents(config: Config, say: Say, make_encoder: MakeEncoder) -> Dataset:
    # Imported late, because synthetic runs need no tokenizer.
    from trainer.data.cache import cache_root
    from trainer.data.opened import open_documents
    from trainer.data.prepared import open_place

    if config.prepared_path:
        prepared, tokenizer = open_place(config)
        return of_rows(config, prepared, tokenizer, config.prepared_path)
    root = cache_root(config.data_cache_directory)
    opened = open_documents(config, root, say, make_encoder)
    if config.data_pipeline == "prepared":
        return of_rows(config, opened.prepare(say), opened.tokenizer, str(root))
    order, rows = _order(config), opened.evaluation
    return Dataset(
        rows and rows.source,
        opened.tokenizer,
        opened.identity("streaming") | {"order": _order_words(config, order)},
        f"{opened.source.name}: tokenized and packed during training; {_held_out(rows, opened.encoder.noun)} ({root})",
        _streamed(opened, order, config.grain_worker_count, say),
    )


def of_rows(config: Config, prepared: "Prepared", tokenizer: Tokenizer | None, place: str) -> Dataset:
    """Returns the data set of prepared rows. `place`: the location of the rows, for the summary."""
    order, noun = _order(config), prepared.noun
    (rows, *others), evaluation = prepared.train, prepared.evaluation if config.eval_interval > 0 else None
    facts = " + ".join(_facts(rows.meta, noun) for rows in prepared.train)
    return Dataset(
        evaluation and evaluation.source,
        tokenizer,
        prepared.identity | {"order": _order_words(config, order)},
        f"{prepared.name}: {facts}; {_held_out(evaluation, noun)} ({place})",
        functools.partial(PreparedStream, **order),
        epoch=None if others else Epoch(rows.source.size, counted(rows.meta["documents"], noun)),
        mixture=_mixture(
            prepared.labels, prepared.weights, [(own.source.size, own.meta["tokens"]) for own in prepared.train]
        ),
        source=_mixed([rows.source for rows in prepared.train], prepared.weights, order),
    )


def _mixture(labels: Sequence[str], weights: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[Component, ...]:
    if len(labels) == 1:
        return ()
    return tuple(
        Component(label, weight / sum(weights), *size)
        for label, weight, size in zip(labels, weights, sizes, strict=True)
    )


def _of_tokens(config: Config, say: Say) -> Dataset:
    """Returns the data set of rows that are read directly from files of token ids."""
    from trainer.data import megatron, prepare
    from trainer.data.cache import cache_root
    from trainer.data.found import train_mixture
    from trainer.data.mixture import whole_weights
    from trainer.data.prepared import short

    root = cache_root(config.data_cache_directory)
    tokenizer = prepare.open_tokenizer(config, (), (), root, say)
    train, fractions, evaluation, documents = megatron.open_files(config, say)
    if config.eval_interval > 0 and evaluation is None:
        raise no_evaluation(config)
    weights, order = whole_weights(fractions), _order(config)
    facts = [_facts(vars(rows)) for rows in train]
    held_out = f"held out {_facts(vars(evaluation), tokens='evaluated')}" if evaluation else "no evaluation"
    identity = {
        "format": prepare.FORMAT,
        "way": config.data_pipeline,
        "documents": f"{short([documents, config.vocab_size])}, weights {':'.join(map(str, weights))}",
        "tokenizer": short(tokenizer.fingerprint) if tokenizer else None,
        "length": config.max_target_length,
        "packing": words(megatron.boundaries(config)),
        "order": _order_words(config, order),
    }
    summary = f"{config.grain_file_type} files {config.grain_train_files}: {' + '.join(facts)}; {held_out}"
    epoch = Epoch(train[0].size, facts[0].partition(",")[0]) if len(train) == 1 else None
    patterns = [pattern for pattern, _ in train_mixture(config)]
    mixture = _mixture(patterns, weights, [(rows.size, rows.tokens) for rows in train])
    found: Any = {"epoch": epoch, "mixture": mixture, "source": _mixed(train, weights, order)}
    return Dataset(evaluation, tokenizer, identity, summary, functools.partial(PreparedStream, **order), **found)


def no_evaluation(config: Config) -> UserError:
    """Returns the error for a data set without rows for evaluation."""
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
    """Returns the alignment of sequences in a row, in tokens: each sequence starts at a multiple of it."""
    return TILE if config.batch_invariant else 1


def _order(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments with which data_pipeline's streams and mixtures order documents or rows."""
    shuffle, seed, window = config.enable_data_shuffling, config.data_shuffle_seed, config.grain_shuffle_buffer_size
    if config.data_pipeline == "streaming":
        return {"seed": seed, "window": window} if shuffle else {"seed": None, "window": 1}
    return {"seed": seed if shuffle else 0, "shuffle": shuffle}


def _mixed(sources: Sequence[RowSource], weights: Sequence[int], order: dict[str, Any]) -> RowSource:
    from trainer.data.mixture import MixedRows

    return sources[0] if len(sources) == 1 else MixedRows(sources, weights, **order)


def _streamed(opened: "Opened", order: dict[str, Any], workers: int, say: Say) -> Callable[..., Stream]:
    from trainer.data.prepare import check_trainable

    source, encoder, packing = opened.source, opened.encoder, opened.packing
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


def _held_out(rows: "Rows | None", noun: str) -> str:
    return f"held out {_facts(rows.meta, noun, 'evaluated')}" if rows else "no evaluation"


def _order_words(config: Config, order: dict[str, Any]) -> str:
    from trainer.data.order import VERSION

    return words(order | ({"version": VERSION} if config.enable_data_shuffling else {}))


def words(settings: dict[str, Any]) -> str:
    """Returns settings as text, for `Dataset.identity`."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())

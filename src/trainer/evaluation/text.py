"""Text tasks: loss, perplexity and bits per byte of documents, whole or in windows."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.config.capabilities.data_keys import FILTERS
from trainer.config.capabilities.token_keys import token_files
from trainer.config.check import contradictions
from trainer.config.errors import UserError, report
from trainer.config.keys import Config
from trainer.config.schema import schema
from trainer.data.batches import eval_batches
from trainer.data.dataset import open_dataset, text_encoder
from trainer.data.documents import Counts, Document
from trainer.data.parts import documents_of
from trainer.data.sources import open_source
from trainer.data.tokenizer import Tokenizer
from trainer.evaluation.model import EvaluatedModel
from trainer.evaluation.scores import Result, Score, ratio
from trainer.evaluation.specs import LLAMA_CPP, TEXT, TRANSFORMERS, Spec

_ROWS = 64  # the number of rows of token ids to read at once
_AT_ONCE = 4096  # the number of windows in memory at once
# Keys that specify held-out documents.
_HELD_OUT = ("eval_dataset_name", "eval_split", "grain_eval_files", "hf_eval_split", "hf_eval_files")
Say = Callable[[str], None]


class Window(NamedTuple):
    """Tokens `begin` to `end` (exclusive) of a text. Tokens from index `first` of the text on are scored."""

    begin: int
    end: int
    first: int


def windows(count: int, context: int, stride: int) -> Iterator[Window]:
    """Yields the windows of a text of `count` tokens as in transformers' guide to perplexity. The windows begin at
    multiples of `stride` and have up to `context` tokens. Each window scores the tokens that no earlier window scored,
    except its first token, which has no predecessor in the window."""
    done = 1
    for begin in range(0, count, stride):
        end = min(begin + context, count)
        if end > max(done, begin + 1):
            yield Window(begin, end, max(done, begin + 1))
        done = end
        if end == count:
            return


def windows_of_llama_cpp(count: int, context: int) -> Iterator[Window]:
    """Yields the windows of a text of `count` tokens as in llama.cpp's program `perplexity`: consecutive windows of
    `context` tokens. Each window scores its tokens from index `context // 2 + 1` on. Tokens after the last whole window
    are unused."""
    for begin in range(0, count - context + 1, context):
        yield Window(begin, begin + context, begin + context // 2 + 1)


class TextTask:
    """A text task.

    Attributes:
      name: the task's name in its scores.
    """

    def __init__(self, spec: Spec, config: Config, tokenizer: Tokenizer | None, limit: int, say: Say):
        """Opens the data.

        Args:
          config: the model's configuration, whose data keys the task may override.
          limit: the maximum number of documents; -1: all.

        Raises:
          UserError: the data are missing or have no text.
        """
        self.name, own = spec.name, dict(spec.settings)
        self._count, self._joined = own.get("count", TRANSFORMERS), own.get("joined", False)
        length = config.max_target_length
        self._context = own.get("context", length)
        self._stride = own.get("stride", self._context)
        if self._context > length + 1:
            raise UserError(
                f"{spec.name}: context={self._context}: the model has {length} positions (max_target_length)"
            )
        if self._stride > self._context:
            raise UserError(f"{spec.name}: stride={self._stride}: allowed: up to context={self._context}")
        documents = _documents(_with_data(config, spec), tokenizer, say, all_allowed=spec.documents or limit >= 0)
        found = itertools.islice(documents, None if limit < 0 else limit)
        self._documents = [document for document in found if len(document.tokens) > 1]
        if not self._documents:
            raise UserError(f"{spec.name}: there is no text to evaluate on")
        self._bos = tokenizer.before_text[0] if tokenizer is not None and tokenizer.before_text else None
        self._bytes = None if tokenizer is None else tokenizer.bytes_per_token

    def run(self, model: EvaluatedModel) -> list[Result]:
        """Returns the scores: loss in nats per token, perplexity and, if tokens represent bytes, bits per byte.

        Raises:
          UserError: no token is scored, because no text has `context` tokens (for llama.cpp's windows), or because the
            loss excludes all tokens.
        """
        texts = [_joined(self._documents)] if self._joined else self._documents
        listed = [(i, window) for i, text in enumerate(texts) for window in self._windows(len(text.tokens))]
        if not listed:
            raise UserError(f"{self.name}: no text reaches context={self._context} tokens; joined: true joins texts")
        sums: list[dict[str, Any]] = []
        for first in range(0, len(listed), _AT_ONCE):
            part = listed[first : first + _AT_ONCE]
            rows = [self._row(texts[i], window) for i, window in part]
            for (i, window), (said, _) in zip(part, model.log_probs(rows), strict=True):
                sums.append({"text": i, **self._sums(texts[i], window, said)})
        samples = _by_text(sums) if len(texts) > 1 else sums
        samples = [sample for sample in samples if sample["tokens"]]
        return [Result(self.name, self._scores(samples), samples)]

    def _windows(self, count: int) -> Iterator[Window]:
        if self._count == LLAMA_CPP:
            return windows_of_llama_cpp(count, self._context)
        return windows(count, self._context, self._stride)

    def _row(self, text: Document, window: Window) -> list[int]:
        row = text.tokens[window.begin : window.end].tolist()
        if self._count == LLAMA_CPP and self._bos is not None:
            row[0] = self._bos  # llama.cpp begins every window with the bos token
        return row

    def _sums(self, text: Document, window: Window, said: np.ndarray) -> dict[str, Any]:
        targets = text.tokens[window.first : window.end]
        counted = np.ones(len(targets), bool) if text.loss is None else text.loss[window.first - 1 : window.end - 1]
        nats = -said[window.first - window.begin - 1 :][counted].sum(dtype=np.float64)
        found = {"tokens": int(counted.sum()), "nats": float(nats)}
        if self._bytes is not None:
            found["bytes"] = int(self._bytes[targets[counted]].sum())
        return found

    def _scores(self, samples: Sequence[Mapping[str, Any]]) -> list[Score]:
        if not samples:
            raise UserError(f"{self.name}: the loss excludes all tokens of the texts")
        nats, tokens = [sample["nats"] for sample in samples], [sample["tokens"] for sample in samples]
        loss = ratio("loss", nats, tokens)
        perplexity = math.exp(min(loss.value, 700.0))
        error = None if loss.error is None else perplexity * loss.error
        found = [loss, Score("perplexity", perplexity, error, loss.samples)]
        if any(sample.get("bytes") for sample in samples):
            bits = [one / math.log(2) for one in nats]
            found.append(ratio("bits_per_byte", bits, [sample["bytes"] for sample in samples]))
        return found


def _with_data(config: Config, spec: Spec) -> Config:
    """Returns `config` with the task's data keys. If the task specifies documents, the keys for held-out documents that
    the task does not set get their defaults, because the values of these keys in `config` belong to other data.

    Raises:
      UserError: the data keys contradict each other.
    """
    values = spec.data
    if not values:
        return config
    unfiltered = {name: schema().keys[name].default for name in ("prepared_path", *FILTERS)}
    merged = {**config, **unfiltered}
    if spec.documents:
        merged |= {name: schema().keys[name].default for name in _HELD_OUT} | {"held_out_share": 0.0}
    if "grain_train_files" in values:
        merged["grain_train_mixture_config_path"] = ""
    merged |= values
    data = {key.name for key in schema().keys.values() if key.section == "Data"}
    where = dict.fromkeys(merged, str(spec.path))
    if mistakes := contradictions(Config(merged), where, merged.keys() - data):
        raise report(mistakes)
    return Config(merged)


def _documents(config: Config, tokenizer: Tokenizer | None, say: Say, *, all_allowed: bool) -> Iterator[Document]:
    """Yields the held-out documents of the data; if none are held out and `all_allowed` is true, all documents. The
    documents have a begin token but no end token. For files of token ids and for synthetic data, yields the segments of
    the held-out rows, unchanged."""
    if config.dataset_type == "synthetic" or token_files(config):
        rows = open_dataset(Config({**config, "eval_interval": 1}), say).evaluation
        assert rows is not None, "open_dataset raises UserError"
        for batch in eval_batches(rows, min(_ROWS, rows.size or _ROWS)):
            for i, segments in enumerate(batch["inputs_segmentation"]):
                yield from _segments({name: array[i] for name, array in batch.items()}, segments)
        return
    if config.prepared_path:
        raise UserError(
            f"prepared_path={config.prepared_path} contains rows, but {TEXT} evaluates whole documents: use a task "
            "file with kind: text that specifies data, or evaluate the held-out rows with eval_interval"
        )
    source = open_source(config, say)
    if not source.evaluation and not all_allowed:
        raise UserError(
            f"{source.name}: nothing is held out for {TEXT}; eval_tasks_limit=N evaluates its first N documents; "
            "held_out_share holds out documents, and a task file with kind: text can specify others"
        )
    corpora = source.evaluation or source.train
    columns = corpora[0].columns
    tokenize = config.tokenize_eval_data if source.evaluation else config.tokenize_train_data
    if tokenize and tokenizer is None:
        raise UserError(f"{source.name}: text needs a tokenizer; give tokenizer_path or tokenizer_type")
    encoder, counts = text_encoder(config, tokenizer, columns, tokenize), Counts()
    for _, document in documents_of(corpora, encoder, counts):
        yield _without_end(document, tokenizer)


def _segments(row: Mapping[str, np.ndarray], segments: np.ndarray) -> Iterator[Document]:
    for segment in range(1, int(segments.max()) + 1):
        (at,) = np.nonzero(segments == segment)
        if at.size:
            tokens = np.append(row["inputs"][at], row["targets"][at[-1]])
            yield Document(tokens, row["targets_segmentation"][at] != 0)


def _without_end(document: Document, tokenizer: Tokenizer | None) -> Document:
    if tokenizer is None or tokenizer.eos is None or document.tokens[-1] != tokenizer.eos:
        return document
    return Document(document.tokens[:-1], None if document.loss is None else document.loss[:-1])


def _joined(texts: Sequence[Document]) -> Document:
    """Returns all texts concatenated, including their begin tokens."""
    masked = any(text.loss is not None for text in texts)
    loss = [np.ones(len(text.tokens) - 1, bool) if text.loss is None else text.loss for text in texts]
    first = [np.ones(1, bool)]
    joined = np.concatenate([part for one in loss for part in (*first, one)])[1:] if masked else None
    return Document(np.concatenate([text.tokens for text in texts]), joined)


def _by_text(sums: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for one in sums:
        total = found.setdefault(one["text"], {"text": one["text"]})
        for name, value in one.items():
            if name != "text":
                total[name] = total.get(name, 0) + value
    return list(found.values())

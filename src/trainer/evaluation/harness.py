"""Runs lm-eval tasks on this process's model. Only `tasks.open_tasks` should import this module, because that function
first sets environment variables that lm-eval and its packages read at import."""

import contextlib
import functools
import io
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import datasets
import lm_eval.tasks
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trainer.chat.template import TemplateFailed
from trainer.config.errors import UserError, nearest, shortened
from trainer.config.words import visible
from trainer.data.functions import failure
from trainer.data.rendered import Rendered
from trainer.evaluation.model import EvaluatedModel, Interrupted
from trainer.evaluation.scores import Result, Score, ratio
from trainer.evaluation.specs import Spec
from trainer.inference.sampling import Sampling

T = TypeVar("T")
_NAMES = re.compile(r"""^(?:task|group|tag): *['"]?([\w.+-]+)""", re.MULTILINE)  # matches names of tasks in a task file
_SEED = 1234  # the seed of the few-shot examples, lm-eval's default
_RESAMPLES = 1000  # the number of bootstrap samples for standard errors of metrics that are not means
_SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "max_length")


class HarnessTask:
    """An lm-eval task, or a group of lm-eval tasks.

    Attributes:
      name: the name of the task or group.
    """

    def __init__(self, spec: Spec, limit: int):
        """Opens the task with its data. `limit`: the maximum number of documents of each task; -1: all.

        Raises:
          UserError: there is no such task, or its data are not on this machine.
        """
        self.name, self._limit = spec.name, None if limit < 0 else limit
        if spec.path is None:
            _check_name(spec.name)
        with _quietly(), _named_data(self.name):
            manager = TaskManager(include_defaults=spec.path is None)
            names = manager.all_tasks if spec.path is None else [str(spec.path)]
            if spec.path is None and spec.name not in names:
                raise UserError(f"{spec.name}: lm-eval has no such task{nearest(spec.name, names)}")
            try:
                self._loaded: Any = manager.load([names[0] if spec.path else spec.name])
            except UserError:
                raise
            except (Exception, SystemExit) as error:  # a task's functions and templates can raise any exception
                kind = type(error).__name__
                raise UserError(f"{spec.path or spec.name}: lm-eval cannot open it: {kind}: {_shown(error)}") from error
        for name, task in self._loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise UserError(f"{name}: tasks that run programs of the model, or show it images, are not supported")
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def run(self, model: EvaluatedModel) -> list[Result]:
        """Returns the scores of each task, named METRIC or METRIC_FILTER after lm-eval's metric and filter.

        Raises:
          UserError: a request does not fit into max_target_length tokens, or the task fails.
        """
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)
        asked = InProcess(model)
        try:
            with _quietly(), model.watched(lambda: asked.answering):
                found: Any = evaluate(
                    asked,
                    self._loaded,
                    limit=self._limit,
                    bootstrap_iters=_RESAMPLES,
                    apply_chat_template=model.chat is not None,
                    fewshot_as_multiturn=model.chat is not None,
                )
        except (Exception, SystemExit) as error:  # a task's functions can raise any exception
            if asked.answering or isinstance(error, UserError | Interrupted):
                raise
            raise UserError(f"{self.name}: the task failed: {failure(error)}") from error
        groups = {name: values for name, values in (found.get("groups") or {}).items() if name not in found["results"]}
        counts = found["n-samples"]
        results = []
        for name, values in (found["results"] | groups).items():
            count = counts[name]["effective"] if name in counts else sum(one["effective"] for one in counts.values())
            rows = found["samples"].get(name, [])
            if scores := list(_scores(values, count, rows)):
                results.append(Result(name, scores, rows))
        return results


def _check_name(name: str) -> None:
    """Raises UserError if no task file of lm-eval contains `name`. This search finds most wrong names in a tenth of the
    time that lm-eval needs to index all tasks."""
    files = Path(str(lm_eval.tasks.__file__)).parent.rglob("*.yaml")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    word = re.compile(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])")
    if not any(map(word.search, texts)):
        names = {found for text in texts for found in _NAMES.findall(text)}
        raise UserError(f"{name}: lm-eval has no such task{nearest(name, sorted(names))}")


def _scores(values: Mapping[str, Any], count: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[Score]:
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric}_{filtered}"
        known = float(error) if isinstance(error, int | float) and count > 1 else _error_of_ratio(metric, value, rows)
        yield Score(name, float(value), known, count)


def _error_of_ratio(metric: str, value: float, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the standard error of a metric, such as perplexity, that is computed from the log-likelihood per word or
    byte; None for other metrics. lm-eval does not compute this error. `value`: the value of the metric. `rows`: the
    samples. Under the metric's name, each sample contains a pair of a log-likelihood and a number of words or bytes."""
    pairs: list[Any] = [row.get(metric) for row in rows]
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return None
    nats = ratio(metric, [-pair[0] for pair in pairs], [pair[1] for pair in pairs])
    slopes = {math.exp(min(nats.value, 700.0)): value, nats.value / math.log(2): 1 / math.log(2)}
    slope = next((slope for found, slope in slopes.items() if math.isclose(found, value, rel_tol=1e-9)), None)
    return None if slope is None or nats.error is None else slope * nats.error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context in which lm-eval shows neither progress bars nor log messages, and starts no subprocesses, because
    forked processes would lack JAX's threads."""
    logger, before = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC")
    level = logger.level
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]


@contextlib.contextmanager
def _named_data(task: str) -> Iterator[None]:
    """A context in which an error of `datasets.load_dataset` becomes a UserError that names the data set."""
    load: Callable[..., Any] = datasets.load_dataset

    def named(path: str, name: str | None = None, **how: Any) -> Any:
        try:
            return load(path, name, **how)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            files = f" {how['data_files']}" if "data_files" in how else ""
            raise UserError(
                f"{task}: its data set {path}{f' ({name})' if name else ''}{files} is not on this machine: "
                f"{_shown(error)}; download it to HF_HOME, or use a task file with your data_files"
            ) from error

    datasets.load_dataset = named
    try:
        yield
    finally:
        datasets.load_dataset = load


def _shown(error: BaseException) -> str:
    return shortened(visible(" ".join(str(error).split()))) or type(error).__name__


def _answering(method: Callable[..., T]) -> Callable[..., T]:
    """Wraps a method of `InProcess`. `InProcess.answering` is true while the method runs, and stays true if the method
    raises an exception. `_quietly` does not hide the method's output."""

    @functools.wraps(method)
    def said(self: "InProcess", *args: Any, **named: Any) -> T:
        self.answering = True
        output, errors = self.streams
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            found = method(self, *args, **named)
        self.answering = False
        return found

    return said


class InProcess(LM):
    """lm-eval's interface to the model. Encodes requests as lm-eval does for models of the package transformers."""

    tokenizer_name = "trainer"

    def __init__(self, model: EvaluatedModel):
        super().__init__()
        self._model = model
        self._rendered: dict[str, Rendered] = {}  # maps the text of each rendered conversation to the conversation
        tokenizer = model.tokenizer
        self._prefix = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
        self.answering = False  # whether the model runs; an exception during this time is not the task's fault
        self.streams = sys.stdout, sys.stderr  # the streams that `_quietly` replaces

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation. Stores the rendered conversation, so that `_encode` encodes the names of
        special tokens outside its messages as special tokens."""
        try:
            rendered = self._model.chat.template.render(chat_history, prompt=add_generation_prompt)  # type: ignore[union-attr]
        except TemplateFailed as error:
            raise UserError(str(error)) from error
        self._rendered[rendered.text] = rendered
        return rendered.text

    @_answering
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each (context, continuation), and whether greedy decoding would produce the
        continuation."""
        return self._model.log_likelihoods([self._pair(*request.args) for request in requests])

    @_answering
    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, computed in windows that count each token once."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for i, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self._model.encode(text),
                prefix_token=self._begin(),
                max_seq_len=self._model.length,
                context_len=1,
            )
            mine = [make_disjoint_window(window) for window in windows]
            pairs += mine
            owners += [i] * len(mine)
        totals = [0.0] * len(requests)
        for i, (found, _) in zip(owners, self._model.log_likelihoods(pairs), strict=True):
            totals[i] += found
        return totals

    @_answering
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the model's continuation of each context. Truncates the beginning of contexts that are too long."""
        model, length = self._model, self._model.length
        found: dict[int, str] = {}
        asked = [_generation(request.args[1]) for request in requests]
        settings, drawn = [given for given, _ in asked], [sampling for _, sampling in asked]
        for sampling in dict.fromkeys(drawn):
            chosen = [i for i, one in enumerate(drawn) if one == sampling]
            limits = [settings[i]["max_gen_toks"] for i in chosen]
            if max(limits) >= length:
                raise UserError(
                    f"answers of up to {max(limits)} tokens leave no room for a question in {length}; "
                    "increase max_target_length, or reduce the task's max_gen_toks"
                )
            prompts = [
                (self._encode(requests[i].args[0]) or [self._begin()])[limit - length :]
                for i, limit in zip(chosen, limits, strict=True)
            ]
            answers = model.answers(prompts, limits, [settings[i]["until"] for i in chosen], sampling)
            found.update(zip(chosen, (answer.text for answer in answers), strict=True))
        return [found[i] for i in range(len(requests))]

    def _begin(self) -> int:
        if self._prefix is None:
            raise UserError("the tokenizer has no token for the beginning or the end of a text, which this task needs")
        return self._prefix

    def _encode(self, text: str, context: str | None = None) -> list[int]:
        """Returns the tokens of `text`. If `context` is not None, it is the beginning of `text`. If `context` (or
        `text`, if `context` is None) is a rendered conversation, the names of special tokens outside its messages
        become special tokens."""
        rendered = self._rendered.get(text if context is None else context)
        if rendered is None:
            return self._model.encode(text)
        (encoded,) = self._model.tokenizer.encode_rendered([rendered._replace(text=text)])
        return encoded.ids.tolist()

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context in self._rendered:
            # Spaces and line feeds at the end of the context belong to the continuation, as they do for contexts that
            # are no conversations.
            whole, before = self._encode(context + continuation, context), self._encode(context.rstrip(), context)
            return before, whole[len(before) :]
        if context:
            return self._model.pair(context, continuation, chat=False)
        tokens = self._model.tokenizer.encode(continuation)
        begin = self._begin()
        return (tokens[:1], tokens[1:]) if tokens[:1] == [begin] else ([begin], tokens)


def _generation(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sampling]:
    """Returns the task's generation_kwargs with lm-eval's defaults for missing settings, and the sampling settings.

    Raises:
      UserError: a setting (of transformers' `generate`) is not supported, or a value is invalid.
    """
    try:
        settings: Mapping[str, Any] = normalize_gen_kwargs(dict(given))
        drawn = (
            float(settings.get("temperature", 1.0)),
            int(settings.get("top_k", 0)),
            float(settings.get("top_p", 1.0)),
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"generation_kwargs: {error}") from error
    if unknown := [name for name in settings if name not in _SETTINGS]:
        raise UserError(f"generation_kwargs: {unknown[0]} is not supported; known: {', '.join(_SETTINGS)}")
    if settings["max_gen_toks"] < 1 or not all(isinstance(text, str) for text in settings["until"]):
        raise UserError("generation_kwargs: max_gen_toks must be at least 1, and until a text or a list of texts")
    return settings, Sampling(*drawn) if settings.get("do_sample") else Sampling(0.0)

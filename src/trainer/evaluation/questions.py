"""Tasks with the user's questions: the model writes an answer, or selects the most likely of several choices."""

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.evaluation.model import Answer, EvaluatedModel, looking
from trainer.evaluation.scores import Result, mean
from trainer.evaluation.specs import PROMPT, Spec, filled
from trainer.rl.rewards import Rewards, Sample, Scored
from trainer.runtime.agreement import from_first

_MAX_TOKENS = 256
_TAKEN = ("prompts", "completions")  # arguments of scoring functions that are not fields of a question
_PER_WORKER = 4  # the number of answers that each worker scores between two checks for the run's end
_PART = 64  # the number of answers that a regular expression searches between two checks for the run's end
Say = Callable[[str], None]


class _Late(Exception):
    """A regular expression takes too long."""


class QuestionsTask:
    """A task of questions.

    Attributes:
      name: the task's name in its scores.
      found: the name of the field in `Result.samples` that contains the text extracted from an answer.
    """

    found = "found"

    def __init__(self, spec: Spec, config: Config, limit: int, say: Say):
        """`limit`: the maximum number of questions; -1: all.

        Raises:
          UserError: a field of the questions has the name `prompts` or `completions`, which the scoring function uses
            for other arguments, or the function does not exist.
        """
        self.name, self._settings, self._say = spec.name, dict(spec.settings), say
        self._where, self._config = (
            f"{spec.file}, line" if "file" in spec.settings else f"{spec.path}, question",
            config,
        )
        self._rows = list(spec.questions if limit < 0 else spec.questions[:limit])
        taken = [name for _, row in self._rows for name in _TAKEN if name in row]
        if taken and "function" in spec.settings:
            raise UserError(f"{spec.path}: {taken[0]} is the name of another argument of functions; rename the field")
        if "function" in spec.settings:
            self._judges(workers=1).close()

    def run(self, model: EvaluatedModel) -> list[Result]:
        """Returns the scores of all questions.

        Raises:
          UserError: a question does not fit into max_target_length tokens, or the function fails.
        """
        return [self._choices(model) if "choices" in self._rows[0][1] else self._answers(model)]

    def _prompt(self, row: Mapping[str, Any]) -> str:
        return filled(self._settings.get("prompt", PROMPT), row)

    def _choices(self, model: EvaluatedModel) -> Result:
        # As in lm-eval, an assistant's message begins without a space.
        delimiter = self._settings.get("delimiter", "" if model.chat else " ")
        asked = [(row, self._prompt(row)) for _, row in self._rows]
        pairs = [model.pair(prompt, delimiter + choice) for row, prompt in asked for choice in row["choices"]]
        said = iter(model.log_likelihoods(pairs))
        right, by_byte, samples = list[float](), list[float](), []
        for row, prompt in asked:
            likely = [next(said)[0] for _ in row["choices"]]
            each = [value / len(choice.encode()) for value, choice in zip(likely, row["choices"], strict=True)]
            answer = row["answer"] if isinstance(row["answer"], int) else row["choices"].index(row["answer"])
            chosen = likely.index(max(likely))
            right.append(float(chosen == answer))
            by_byte.append(float(each.index(max(each)) == answer))
            samples.append(
                {
                    "prompt": prompt,
                    "choices": row["choices"],
                    "log_likelihoods": likely,
                    "answer": row["choices"][chosen],
                    "expected": row["choices"][answer],
                    "accuracy": right[-1],
                    "accuracy_per_byte": by_byte[-1],
                }
            )
        return Result(self.name, [mean("accuracy", right), mean("accuracy_per_byte", by_byte)], samples)

    def _answers(self, model: EvaluatedModel) -> Result:
        prompts = [self._prompt(row) for _, row in self._rows]
        tokens = [model.prompt(prompt) for prompt in prompts]
        for (line, _), row in zip(self._rows, tokens, strict=True):
            if not 0 < len(row) < model.length:
                raise UserError(
                    f"{self._where} {line}: the prompt has {len(row):,} tokens: allowed: 1 to "
                    f"{model.length - 1:,}, which leaves room for an answer; give a larger max_target_length"
                )
        limit, until = self._settings.get("max_tokens", _MAX_TOKENS), self._settings.get("until", [])
        answers = model.answers(tokens, [limit] * len(tokens), [until] * len(tokens))
        metric, values, found = self._judged(prompts, answers, model)
        samples = [
            {
                "prompt": prompt,
                "answer": answer.text,
                "end": answer.end,
                "expected": row.get("answer"),
                **({} if text is None else {self.found: text}),
                metric: value,
            }
            for (_, row), prompt, answer, text, value in zip(self._rows, prompts, answers, found, values, strict=True)
        ]
        return Result(self.name, [mean(metric, values)], samples)

    def _judged(
        self, prompts: Sequence[str], answers: Sequence[Answer], model: EvaluatedModel
    ) -> tuple[str, list[float], Sequence[str | None]]:
        """Returns the metric's name, a list of its values for the answers, and for each answer the text that the
        regular expression found (None if it found none, or if the task has no regular expression)."""
        if self._settings.get("score", "exact") == "function":
            judged = list(self._by_function(prompts, answers, model))
            if late := sum(one.timed_out for one in judged):
                self._say(f"{self.name}: the function took too long for {late} of {len(judged)} answers, which score 0")
            return "score", [one.reward for one in judged], [None] * len(answers)
        pattern = self._settings.get("pattern")
        texts: Sequence[str | None] = [answer.text for answer in answers]
        if pattern is not None:
            texts = self._by_pattern(pattern, answers, model)
        values = [float(self._matches(text, row)) for text, (_, row) in zip(texts, self._rows, strict=True)]
        return (
            ("exact_match" if pattern is None else "match"),
            values,
            [None if pattern is None else text for text in texts],
        )

    def _by_pattern(self, pattern: str, answers: Sequence[Answer], model: EvaluatedModel) -> list[str | None]:
        """Returns the text that the regular expression finds in each answer. The first process searches for all
        processes. A search that exceeds reward_worker_timeout_seconds finds nothing."""
        seconds, found, late = self._config.reward_worker_timeout_seconds, list[str | None](), 0

        def find(text: str) -> tuple[str | None, bool]:
            deadline = time.monotonic() + seconds

            def look() -> None:
                if jax.process_count() == 1:
                    model.check_goes_on()
                if time.monotonic() > deadline:
                    raise _Late

            try:
                with looking(look):
                    return _last(pattern, text), False
            except _Late:
                return None, True

        def find_all(part: Sequence[Answer]) -> list[tuple[str | None, bool]]:
            return [find(answer.text) for answer in part]

        for first in range(0, len(answers), _PART):
            for text, was_late in from_first(functools.partial(find_all, answers[first : first + _PART])):
                found.append(text)
                late += was_late
            model.check_goes_on()
        if late:
            self._say(f"{self.name}: the pattern took too long in {late} of {len(found)} answers, which do not match")
        return found

    def _matches(self, text: str | None, row: Mapping[str, Any]) -> bool:
        if text is None:
            return False
        expected = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        forms = [str(one).strip() for one in expected]
        text = text.strip()
        if self._settings.get("ignore_case", False):
            return text.casefold() in [form.casefold() for form in forms]
        return text in forms

    def _judges(self, workers: int, meanwhile: Callable[[], None] = lambda: None) -> Rewards:
        seconds = self._config.reward_worker_timeout_seconds
        return Rewards([self._settings["function"]], workers, seconds, self._say, "function", meanwhile)

    def _by_function(
        self, prompts: Sequence[str], answers: Sequence[Answer], model: EvaluatedModel
    ) -> Iterator[Scored]:
        """Yields the result of the user's function for each answer. Only the first process calls the function."""
        samples = [
            Sample(prompt, answer.text, row, f"{self._where} {line}")
            for (line, row), prompt, answer in zip(self._rows, prompts, answers, strict=True)
        ]
        workers = self._config.reward_num_workers
        judges: list[Rewards] = []
        # Several processes must stop together, so they check for the end of the run only after each part of the
        # answers.
        meanwhile = model.check_goes_on if jax.process_count() == 1 else lambda: None

        def judged(part: Sequence[Sample]) -> list[Scored]:
            if not judges:
                judges.append(self._judges(workers, meanwhile))
            return judges[0](part)

        try:
            for first in range(0, len(samples), workers * _PER_WORKER):
                part = samples[first : first + workers * _PER_WORKER]
                yield from (Scored(*one) for one in from_first(lambda part=part: judged(part)))  # type: ignore[misc]
                model.check_goes_on()
        finally:
            for judge in judges:
                judge.close()


def _last(pattern: str, text: str) -> str | None:
    """Returns the first group of the last match, or the whole match if the pattern has no groups; None without a
    match."""
    last = None
    for last in re.finditer(pattern, text):  # noqa: B007
        pass
    return None if last is None else last.group(1 if last.re.groups else 0)

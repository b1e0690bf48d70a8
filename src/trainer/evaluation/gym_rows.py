"""Generates the questions of a reasoning-gym data set, and judges answers with the data set's verifier.

The generator and the verifier run in separate processes, which load neither JAX nor trainer's configuration. These
processes use PYTHONHASHSEED=0, because the questions of five data sets depend on the hash seed.
"""

import functools
import inspect
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

# Matches calls that evaluate a text as code. Some verifiers apply such a function to the answer.
_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")


def main(given: str) -> None:
    """Generates the questions and prints a JSON object.

    `given` is the JSON text of a list with two items: the description of the data set (a list of its name, seed, size
    and configuration), and the maximum number of questions. The printed object has two fields: `rows` is a list of
    (question, answer) pairs, and `evaluates` is true if the verifier's module evaluates texts as code. If the data set
    cannot be created, the object instead has three fields: `problem` is the name of the wrong field of the task,
    `value` is this field's value or the error, and `choices` is a list of the allowed values.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, count = json.loads(given)
    name, seed, size, settings = task
    fields = [] if name not in DATASETS else [*inspect.signature(DATASETS[name][1]).parameters]
    fields = [field for field in fields if field not in ("seed", "size")]
    if not fields:
        found: dict[str, Any] = {"problem": "dataset", "value": name, "choices": sorted(DATASETS)}
    elif unknown := [field for field in settings if field not in fields]:
        found = {"problem": "config", "value": unknown[0], "choices": fields}
    else:
        try:
            opened = reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
            rows = [(opened[i]["question"], opened[i]["answer"]) for i in range(min(size, count))]
            modules = {
                sys.modules[each.__module__] for each in type(opened).__mro__ if "reasoning_gym" in each.__module__
            }
            found = {"rows": rows, "evaluates": any(_EVALUATES.search(inspect.getsource(one)) for one in modules)}
        except Exception as error:  # the package's checks are assertions, and its data sets can raise any exception
            found = {"problem": "config", "value": f"{type(error).__name__}: {error}", "choices": []}
    print(json.dumps(found))


@functools.cache
def _opened(task: str) -> Any:
    """Returns a data set. `task`: the JSON text of a list of the data set's name, seed, size and configuration."""
    import reasoning_gym

    name, seed, size, settings = json.loads(task)
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)


@functools.lru_cache(1)
def _entry(task: str, index: int) -> Any:
    return _opened(task)[index]


def judge(completions: Sequence[str], task: Sequence[str], index: Sequence[int]) -> float:
    """Returns the verifier's score, from 0 to 1, of a completion. The verifier gets the text in the last <answer>
    </answer>, or the whole completion if it contains no such tags. Each parameter is a list with one value, as in
    reward functions."""
    from reasoning_gym.utils import extract_answer

    (completion,), (described,), (number,) = completions, task, index
    answer = extract_answer(completion)
    entry = _entry(described, number)
    return float(_opened(described).score_answer(completion.strip() if answer is None else answer, entry))

"""Opens tasks, runs them and stores their results."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.data.tokenizer import Tokenizer
from trainer.evaluation.model import EvaluatedModel
from trainer.evaluation.scores import Result
from trainer.evaluation.specs import GYM, PROGRAMS, QUESTIONS, TEXT, Spec
from trainer.observe.rundir import writing
from trainer.runtime.agreement import from_first
from trainer.runtime.attempts import turn_hub_off
from trainer.runtime.folders import replace_file

# Environment variables that packages read at import. The value 1 prevents downloads during a run.
_OFFLINE = ("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
RESULTS_FILE = "results.json"
Say = Callable[[str], None]


class Task(Protocol):
    """An opened task."""

    name: str

    def run(self, model: EvaluatedModel) -> list[Result]:
        """Returns the model's scores. Raises UserError if the task fails."""


def open_tasks(specs: Sequence[Spec], config: Config, tokenizer: Tokenizer | None, say: Say) -> list[Task]:
    """Opens the tasks with their data. `config`: the model's configuration; its eval_tasks_limit is the maximum number
    of samples per task.

    Raises:
      UserError: data are missing, or a task needs a tokenizer.
    """
    limit, allow_code, found = config.eval_tasks_limit, config.eval_tasks_allow_code, list[Task]()
    for spec in specs:
        if spec.kind == TEXT:
            from trainer.evaluation.text import TextTask

            found.append(TextTask(spec, config, tokenizer, limit, say))
            continue
        if tokenizer is None:
            raise UserError(f"{spec.name}: questions need a tokenizer; give tokenizer_path or tokenizer_type")
        if spec.kind in (QUESTIONS, GYM):
            from trainer.evaluation.gym import with_questions
            from trainer.evaluation.questions import QuestionsTask

            if spec.kind == GYM:
                spec = with_questions(spec, limit, allow_code)
            found.append(QuestionsTask(spec, config, limit, say))
        elif spec.kind == PROGRAMS:
            from trainer.evaluation.programs_task import ProgramsTask

            found.append(ProgramsTask(spec, config, limit, say))
        else:
            turn_hub_off()
            for name in _OFFLINE:
                os.environ.setdefault(name, "1")
            from trainer.evaluation.harness import HarnessTask

            found.append(HarnessTask(spec, limit))
    return found


def keep(folder: Path, results: Sequence[Result]) -> None:
    """In the first process, writes the scores to results.json in `folder`, and each task's samples to TASK.jsonl.

    Raises:
      UserError: the files cannot be written.
    """
    scores = [{"task": result.task, **score._asdict()} for result in results for score in result.scores]

    def write() -> None:
        with writing(folder / RESULTS_FILE):
            folder.mkdir(parents=True, exist_ok=True)
            for result in results:
                lines = (json.dumps(row, ensure_ascii=False, default=str) for row in result.samples)
                name = re.sub(r"[^\w.+-]", "_", result.task)
                replace_file(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
            replace_file(folder / RESULTS_FILE, json.dumps(scores, indent=2) + "\n")

    from_first(write)

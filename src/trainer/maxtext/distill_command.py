"""Converts MaxText's distillation commands.

In MaxText, the student's keys come from the yml, the command line and `student_overrides`, in order of increasing
precedence; the teacher's keys come from the yml and `teacher_overrides`. In this trainer, the student's keys come from
the whole command, and the teacher's keys from the teacher's folder and `teacher_overrides`. Therefore, the converted
command contains the yml's keys as arguments: the student's as KEY=VALUE, and the teacher's in `teacher_overrides`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from trainer.config.capabilities.chat_keys import DISTILL
from trainer.config.dump import to_flow
from trainer.config.environment import variables
from trainer.config.files import MAXTEXT_YML, POST_TRAIN, Entry, is_maxtexts_base, read_chain
from trainer.config.load import Loaded
from trainer.config.maxtext import verdicts
from trainer.config.plain_yaml import compose, construct
from trainer.config.schema import schema
from trainer.config.shared_keys import SHARED
from trainer.config.values import read_text
from trainer.maxtext.command_line import Command
from trainer.maxtext.convert import EXPORT, Conversion, convert
from trainer.maxtext.parameters import of_parameters
from trainer.maxtext.program import program_yml
from trainer.maxtext.rows import REFUSED, Row
from trainer.maxtext.shell_words import has_variable
from trainer.maxtext.version import NO_DATA, changes, is_theirs, version_of, yml_of

_METHOD, _STUDENT, _TEACHER, _PLACE = "use_distill", "student_overrides", "teacher_overrides", "load_parameters_path"
_MODEL = "llama3.1-8b"  # the preset of student and teacher in MaxText's distillation.yml
_DTYPE = "bfloat16"  # MaxText's default
# Keys that MaxText's distillation ignores and our command omits.
_IGNORED = {
    "learning_rate_schedule_steps": "MaxText's distillation ignores it; its schedules end at `steps`",
    "lr_schedule_type": "MaxText's distillation ignores it; its schedule is cosine",
    "z_loss_multiplier": "MaxText's distillation ignores it",
}


class _Yml(NamedTuple):
    """The yml of a command.

    Attributes:
      name: the file of MaxText from which the yml is derived.
      entries: the yml's changes to that file.
      names: all keys of the yml.
    """

    name: str
    entries: list[Entry]
    names: list[str]


def converted(command: Command, version: str = "") -> Conversion:
    """Returns our command for the distillation command `command`. `version`: see `convert.convert`."""
    yml = _read(command.yml)
    if yml is None:
        return convert(command, DISTILL, version)
    version = version or version_of(yml.names)
    own = not yml.name or bool(program_yml(yml.name))
    overrides: dict[str, dict[str, str]] = {
        name: {"model_name": _MODEL} if own else {} for name in (_STUDENT, _TEACHER)
    }
    in_yml = _texts(_without_overrides([f"{entry.name}={_text(entry.node)}" for entry in yml.entries], overrides))
    on_line = _without_overrides(command.words, overrides)
    student, teacher = overrides[_STUDENT], overrides[_TEACHER]

    rows, words, prefixed = list[Row](), list[str](), dict[str, str]()
    given = _texts(on_line)
    for word in [*_words({name: text for name, text in in_yml.items() if name not in given}), *on_line]:
        name = word.partition("=")[0]
        why = f"{_STUDENT}.{name} takes its place" if name in student else _IGNORED.get(name, "")
        if why:
            rows.append(Row(word, verdicts.NEEDLESS, why, ""))
        else:
            words.append(word)
    for name, text in student.items():
        word = f"{name}={text}"
        if name in _IGNORED:
            rows.append(Row(f"{_STUDENT}.{word}", verdicts.NEEDLESS, _IGNORED[name], ""))
        else:
            words.append(word)
            prefixed[word] = f"{_STUDENT}.{word}"

    both = in_yml | {name: text for name, (_, text) in variables(command.environment)[0].items()}
    teacher = {name: text for name, text in both.items() if of_parameters(name)} | teacher
    dtype = teacher.get("dtype", both.get("dtype", _DTYPE))
    if dtype != (both | _texts(words)).get("dtype", _DTYPE):
        teacher["dtype"] = dtype
    path = teacher.pop(_PLACE, "")
    shared = {name: teacher.pop(name) for name in list(teacher) if name in SHARED}
    its = convert(Command("", {}, "", _words(teacher)), EXPORT, version)
    added = [f"teacher_path={path}"] if path else []
    if keys := _texts(word for word in its.words[4:] if word != NO_DATA):
        added.append(f"{_TEACHER}={_flow(keys)}")

    made = convert(command._replace(yml=yml.name, words=[*words, *added]), DISTILL, version)
    rows += [
        row._replace(given=prefixed.get(row.given, row.given))
        for row in made.rows
        if row.given not in added or row.problem
    ]
    if path:
        why = "teacher_path: a checkpoint of MaxText, a Hugging Face folder, a run, or the output of trainer.export"
        rows.append(Row(f"{_TEACHER}.{_PLACE}={path}", verdicts.RENAMED, why, ""))
    rows += [row._replace(given=f"{_TEACHER}.{row.given}", word="") for row in its.rows]
    rows += [_of_both(name, text, made.loaded) for name, text in shared.items()]
    return made._replace(rows=rows, problems=[*made.problems, *(f"the teacher: {line}" for line in its.problems)])


def _read(yml: str) -> _Yml | None:
    """Returns the content of a command's yml; None if it cannot be read, or belongs to another program."""
    found = yml_of(yml)
    if not yml or is_maxtexts_base(yml) or (found.name == MAXTEXT_YML.name and not found.names):
        return _Yml(yml, [], [])
    files, mistakes, _ = read_chain(yml, schema())
    own = [file for file in files if file.path != MAXTEXT_YML]
    programs = {program_yml(name) for name in (found.below, *(file.path.as_posix() for file in own))} - {""}
    if mistakes or programs - {_METHOD}:
        return None
    path = POST_TRAIN[_METHOD]
    name = f"{path.parent.name}/{path.name}" if programs or found.below else "base.yml"
    entries = [entry for file in own for entry in (changes(file) if is_theirs(file) else file.entries)]
    return _Yml(name, entries, list(found.names))


def _without_overrides(words: Iterable[str], overrides: Mapping[str, dict[str, str]]) -> list[str]:
    """Moves the overrides of student and teacher from `words` to `overrides`, and returns the other words."""
    others = []
    for word in words:
        name, _, text = word.partition("=")
        group, dot, key = name.partition(".")
        items = {key: text} if dot else _items(text)
        if group not in overrides or items is None:
            others.append(word)
        else:
            overrides[group] |= items
    return others


def _items(text: str) -> dict[str, str] | None:
    """Returns the items of the mapping `text` in YAML's flow style; None if `text` is not a mapping."""
    try:
        node = compose(text)
    except yaml.YAMLError:
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    return {key.value: _text(value) for key, value in node.value}


def _text(node: yaml.Node) -> str:
    """Returns a yml's value as the text to write after KEY=."""
    return (node.value or "null") if isinstance(node, yaml.ScalarNode) else to_flow(construct(node))


def _texts(words: Iterable[str]) -> dict[str, str]:
    """Returns the value of each key in `words`, as text."""
    return dict(word.partition("=")[::2] for word in words)


def _words(texts: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in texts.items()]


def _flow(texts: Mapping[str, str]) -> str:
    values = {name: _value(name, text) for name, text in texts.items()}
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True).strip()


def _value(name: str, text: str) -> Any:
    try:
        return read_text(schema().keys[name], text)
    except (KeyError, ValueError):  # a row reports the problem
        return text


def _of_both(name: str, text: str, loaded: Loaded | None) -> Row:
    """Returns the verdict on a key of the teacher that must have the same value for teacher and student."""
    given = f"{_TEACHER}.{name}={text}"
    why = "teacher and student have the same value"
    if loaded is None or has_variable(text) or _value(name, text) == loaded.config[name]:
        return Row(given, verdicts.NEEDLESS, why, "")
    why = f"{why}: give {name}={text} for both, or leave it out (the student has {to_flow(loaded.config[name])})"
    return Row(given, REFUSED, why, "", f"{given}: {why}")

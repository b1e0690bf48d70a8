"""Stage 1: from a command line to a configuration, before any device is known and without JAX."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_collections

from trainer.config.check import contradictions
from trainer.config.dump import to_flow
from trainer.config.effects import without_effect
from trainer.config.errors import nearest, report, shortened
from trainer.config.files import COMMAND_LINE, PRESETS, Entry, YmlFile, preset_names, read_chain, read_file
from trainer.config.flags import removal
from trainer.config.help import help_text
from trainer.config.paths import is_file
from trainer.config.rules import merge_rules, read_rules
from trainer.config.schema import Key, Schema, schema
from trainer.config.values import check, read_node, read_text

_YML_ENDINGS = (".yml", ".yaml")
_RULES = "logical_axis_rules"


@dataclass(frozen=True)
class Setting:
    """A value that some source gives a key, and the place that gives it."""

    value: Any
    where: str


@dataclass(frozen=True)
class Loaded:
    """What a command line asks for.

    Attributes:
      config: every key of base.yml with its value; `auto`, -1 and other open values are still open.
      changed: the keys that the user's yml or the command line gives, and where.
      warnings: keys that a file gives twice, and given keys without effect under the chosen settings, one line each.
      notes: what was understood differently from how it was written, and what of the preset was changed, one line each.
    """

    config: ml_collections.ConfigDict
    changed: dict[str, str]
    warnings: list[str]
    notes: list[str]


@dataclass
class _Reader:
    """Reads settings by the schema; collects what is wrong, and the names of the keys whose value is unknown then."""

    schema: Schema
    mistakes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def setting(self, name: str, given: str, where: str, read: Callable[[Key], Any]) -> dict[str, Setting]:
        """{name: setting}, or {} after a mistake."""
        shown = f"{shortened(name)}={shortened(given)} ({where})"
        key = self.schema.keys.get(name)
        if key is None:
            self.mistakes.append(f"{shown}: there is no key {shortened(name)}{nearest(name, self.schema.keys)}")
            return {}
        problems: list[str] = []
        try:
            value = read(key)
        except ValueError as error:
            problems = [f"{error}; allowed: {key.allowed}"]
        else:
            if problem := check(key, value):
                problems = [f"{problem}; allowed: {key.allowed}{nearest(given, map(str, key.choices))}"]
            elif name == _RULES:
                value, problems = read_rules(value, [rule[0] for rule in key.default])
        if problems:
            self.mistakes += [f"{shown}: {problem}" for problem in problems]
            self.broken.add(name)
            return {}
        return {name: Setting(value, where)}

    def entry(self, entry: Entry) -> dict[str, Setting]:
        """The setting of one entry of a file."""
        return self.setting(entry.name, entry.given, entry.where, functools.partial(read_node, node=entry.node))

    def file(self, file: YmlFile) -> dict[str, Setting]:
        """The settings of a file. Those of a root count where they differ from the packed base.yml, which it copies."""
        settings: dict[str, Setting] = {}
        for entry in file.entries:
            settings |= self.entry(entry)
        if not file.is_root:
            return settings
        return {name: it for name, it in settings.items() if it.value != self.schema.keys[name].default}


def load(argv: Sequence[str]) -> Loaded:
    """The configuration that `argv`, the words after the module's name, asks for: stage 1.

    Later wins: base.yml, the preset of model_name, the user's yml over its parents, the command line.

    Raises:
      UserError: all mistakes of the stage at once, one line each.
      SystemExit: with code 0, after `help`, `--help` or `-h` printed every key.
    """
    if {"help", "--help", "-h"} & set(argv):
        print(help_text())
        raise SystemExit(0)
    reader = _Reader(schema())
    yml, words = _split(argv)
    files, mistakes, notes = read_chain(yml, reader.schema)
    reader.mistakes += mistakes
    given: dict[str, Setting] = {}
    for file in files:
        given = _merge(given, reader.file(file))
    given = _merge(given, _command_line(reader, words))
    values = {key.name: Setting(copy.deepcopy(key.default), "default") for key in reader.schema.keys.values()}
    preset = _preset(reader, (values | given)["model_name"])
    values = _merge(_merge(values, preset), given)

    config = ml_collections.ConfigDict({name: setting.value for name, setting in values.items()})
    changed = {name: setting.where for name, setting in given.items()}
    reader.mistakes += contradictions(config, {n: s.where for n, s in values.items()}, reader.broken)
    if reader.mistakes:
        raise report(reader.mistakes)
    notes += _changes(preset, values)
    if notice := removal(config):
        notes.append(notice)
    warnings = [line for file in files for line in file.repeated] + without_effect(config, changed)
    return Loaded(config, changed, warnings, notes)


def _split(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The yml that the first word names, else base.yml, and the other words."""
    first = argv[0] if argv else ""
    looks_like_yml = first.endswith(_YML_ENDINGS) and ("=" not in first or is_file(first))
    if looks_like_yml or ("=" not in first and not first.startswith("-") and is_file(first)):
        return first, argv[1:]
    return "base.yml", argv


def _command_line(reader: _Reader, words: Sequence[str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for word in words:
        name, equals, text = word.partition("=")
        problem = _malformed(reader.schema, name, bool(equals), text)
        if problem:
            reader.mistakes.append(f"{shortened(word)} ({COMMAND_LINE}): {problem}")
        else:
            settings |= reader.setting(name, text, COMMAND_LINE, functools.partial(read_text, text=text))
    return settings


def _malformed(schema: Schema, name: str, has_value: bool, text: str) -> str | None:
    bare = name.lstrip("-").replace("-", "_")
    if name.startswith("-"):
        if bare not in schema.keys:
            return f"there is no such option; keys are written key=value, --help lists them{nearest(bare, schema.keys)}"
        return f"keys have no dashes; write {bare}={shortened(text) if has_value else 'VALUE'}"
    if has_value:
        return None
    if name.endswith(_YML_ENDINGS):
        return "only the first word may be a yml; give it a parent with `base_config:`"
    return f"no value; write {name}=VALUE" if name in schema.keys else f"not key=value{nearest(name, schema.keys)}"


def _preset(reader: _Reader, model_name: Setting) -> dict[str, Setting]:
    name = model_name.value
    if name not in preset_names():
        allowed = f"{', '.join(preset_names())}{nearest(name, preset_names())}"
        shown = f"model_name={shortened(name)} ({model_name.where})"
        reader.mistakes.append(f"{shown}: there is no such preset; allowed: {allowed}")
    if name == "default" or name not in preset_names():
        return {}
    entries, problem, _ = read_file(PRESETS / f"{name}.yml")
    assert problem is None, problem
    return reader.file(YmlFile(PRESETS / f"{name}.yml", entries))


def _changes(preset: dict[str, Setting], values: dict[str, Setting]) -> list[str]:
    """One line for each key to which the user gives another value than the preset."""
    name = values["model_name"].value
    return [
        f"model_name={name}: {key} {to_flow(said.value)} -> {to_flow(values[key].value)} ({values[key].where})"
        for key, said in preset.items()
        if values[key].value != said.value
    ]


def _merge(below: dict[str, Setting], above: dict[str, Setting]) -> dict[str, Setting]:
    merged = below | above
    if _RULES in below and _RULES in above:
        rules = merge_rules(below[_RULES].value, above[_RULES].value)
        merged[_RULES] = Setting(rules, above[_RULES].where)
    return merged

"""Stage 1: from a command line to a configuration, before any device is known and without JAX."""

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_collections

from trainer.config import maxtext, maxtext_base
from trainer.config.check import contradictions
from trainer.config.data_keys import OWN_KEYS, data_not_asked_for
from trainer.config.dump import to_flow
from trainer.config.effects import inert_keys, without_effect
from trainer.config.errors import nearest, on_one_screen, report, shortened
from trainer.config.files import (
    COMMAND_LINE,
    DEFAULT,
    MAXTEXT_YML,
    PRESETS,
    YmlFile,
    preset_names,
    read_chain,
    read_file,
)
from trainer.config.flags import removal
from trainer.config.help import help_text
from trainer.config.paths import is_file
from trainer.config.reader import Reader, Setting, merge
from trainer.config.scale import growth, scaled
from trainer.config.schema import Schema, schema
from trainer.config.trust import foreign_code
from trainer.config.values import read_text

_YML_ENDINGS = (".yml", ".yaml")


@dataclass(frozen=True)
class Loaded:
    """What a command line asks for.

    Attributes:
      config: every key of base.yml with its value; `auto`, -1 and other open values are still open. The sizes of the
        model are those after `global_parameter_scale`, which is 1 here.
      changed: the keys that the user's yml or the command line gives, and where.
      warnings: keys that a file gives twice, and given keys without effect under the chosen settings, one line each.
      notes: what was understood differently from how it was written, and what of the preset was changed, one line each.
    """

    config: ml_collections.ConfigDict
    changed: dict[str, str]
    warnings: list[str]
    notes: list[str]


def load(argv: Sequence[str], place: str = COMMAND_LINE) -> Loaded:
    """The configuration that `argv`, the words after the module's name, asks for: stage 1.

    Later wins: base.yml, maxtext.yml where that is the yml or a parent of it, the preset of model_name, the user's yml
    over its parents, the command line. `place` is where the words come from, for messages.

    Raises:
      UserError: all mistakes of the stage at once, one line each.
      SystemExit: with code 0, after `help`, `--help` or `-h` printed every key.
    """
    if {"help", "--help", "-h"} & set(argv):
        print(help_text())
        raise SystemExit(0)
    reader = Reader(schema())
    yml, words = _split(argv)
    files, mistakes, notes = read_chain(yml, reader.schema)
    reader.mistakes += mistakes
    given: dict[str, Setting] = {}
    values = {key.name: Setting(copy.deepcopy(key.default), DEFAULT) for key in reader.schema.keys.values()}
    for file in files:
        settings = reader.file(file)
        if file.path == MAXTEXT_YML:
            values |= {name: Setting(it.value, MAXTEXT_YML.name) for name, it in settings.items()}
        else:
            given = merge(given, settings)
    given = merge(given, _command_line(reader, words, place))
    preset = _preset(reader, (values | given)["model_name"])
    values = merge(merge(values, preset), given)

    sized = scaled(values)
    config = ml_collections.ConfigDict({name: setting.value for name, setting in sized.items()})
    changed = {name: setting.where for name, setting in given.items()}
    where = {name: setting.where for name, setting in sized.items()}
    reader.mistakes += _outgrown(reader.schema, values, sized)
    reader.mistakes += contradictions(config, where, reader.broken)
    if "dataset_type" not in reader.broken:
        base = next((str(file.path) for file in files if file.is_maxtext), None)
        reader.mistakes += data_not_asked_for(config, where, changed, base)
    reader.mistakes += foreign_code(reader.schema.keys, config, changed)
    if reader.mistakes:
        raise report(reader.mistakes)
    notes += _other_defaults(yml, files, config, where, notes)
    notes += [*_changes(preset, values), *growth(values, sized), *maxtext.notes_of(reader.accepted)]
    if notice := removal(config):
        notes.append(notice)
    warnings = [line for file in files for line in file.repeated] + _not_known(reader.unknown)
    warnings += without_effect(config, changed)
    return Loaded(config, changed, on_one_screen(warnings), on_one_screen(notes))


def _outgrown(schema: Schema, values: dict[str, Setting], sized: dict[str, Setting]) -> list[str]:
    """One line for each size that global_parameter_scale takes out of its range."""
    grown = {name: it for name, it in sized.items() if it.value != values[name].value}
    checked = ((name, it, schema.keys[name]) for name, it in grown.items())
    return [
        f"{name}={it.value} ({it.where}): out of range; allowed: {key.allowed}"
        for name, it, key in checked
        if not key.accepts(it.value)
    ]


def _other_defaults(
    yml: str, files: Sequence[YmlFile], config: Any, where: Mapping[str, str], notes: Sequence[str]
) -> list[str]:
    """Lines about defaults that are not MaxText's, where a person may expect those: with MaxText's base.yml, with a
    preset, with data of one's own."""
    base = [file for file in files if file.is_maxtext]
    own = config.model_name != "default" or config.dataset_type in OWN_KEYS
    if not (base or notes or own):
        return []
    inert = inert_keys(config)
    unset = [name for name, place in where.items() if place == DEFAULT and name not in inert]
    differing = maxtext_base.differing(config, unset)
    said = "is MaxText's base.yml: what was changed in it counts, all other keys take this trainer's defaults"
    begin = [f"{file.path} {said}{maxtext_base.tables(file.entries)}" for file in base]
    return [*begin, *differing, f"for MaxText's defaults {_how_to_take_theirs(yml, files)}"] if differing else begin


def _how_to_take_theirs(yml: str, files: Sequence[YmlFile]) -> str:
    children = [file for file in files if not file.is_maxtext]
    if children:
        return f"write base_config: maxtext.yml in {children[0].path}"
    if yml == "base.yml" and not files:
        return "write maxtext.yml as the first word"
    changed = ", and what was changed in it as key=value" if files else ""
    return f"write maxtext.yml in place of {shortened(yml)}{changed}"


def _not_known(names: Sequence[str]) -> list[str]:
    """One line about keys of a MaxText base.yml of another version."""
    if not names:
        return []
    shown = f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
    return [f"keys of this MaxText base.yml that are not known here, and not read: {shown}"]


def _split(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The yml that the first word names, else base.yml, and the other words."""
    first = argv[0] if argv else ""
    looks_like_yml = first.endswith(_YML_ENDINGS) and ("=" not in first or is_file(first))
    if looks_like_yml or ("=" not in first and not first.startswith("-") and is_file(first)):
        return first, argv[1:]
    return "base.yml", argv


def _command_line(reader: Reader, words: Sequence[str], place: str) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for word in words:
        name, equals, text = word.partition("=")
        problem = _malformed(reader, name, bool(equals), text)
        if problem:
            reader.mistakes.append(f"{shortened(word)} ({place}): {problem}")
        else:
            settings |= reader.setting(name, text, place, functools.partial(read_text, text=text))
    return settings


def _malformed(reader: Reader, name: str, has_value: bool, text: str) -> str | None:
    keys = reader.schema.keys
    bare = name.lstrip("-").replace("-", "_")
    if re.match("base_config(:|$)", bare):
        return "base_config belongs in a yml; on the command line the first word names the yml"
    if name.startswith("-"):
        if bare not in keys:
            return f"there is no such option; keys are written key=value, --help lists them{reader.nearest_key(bare)}"
        return f"keys have no dashes; write {bare}={shortened(text) if has_value else 'VALUE'}"
    if has_value:
        return None
    if name.endswith(_YML_ENDINGS):
        return "only the first word may be a yml; give it a parent with `base_config:`"
    return f"no value; write {name}=VALUE" if name in keys else f"not key=value{reader.nearest_key(name)}"


def _preset(reader: Reader, model_name: Setting) -> dict[str, Setting]:
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

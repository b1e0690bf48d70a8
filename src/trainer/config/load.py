"""Stage 1: turns a command line into a configuration, before the devices are known and without JAX."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_collections

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.capabilities.data_keys import OWN_KEYS, data_not_asked_for
from trainer.config.capabilities.rl_keys import drifts
from trainer.config.check import contradictions
from trainer.config.command import read_by_hand, read_words, split
from trainer.config.derived import has_rollouts
from trainer.config.dump import as_words, to_flow
from trainer.config.effects import inert_keys, no_effect_of, without_effect
from trainer.config.errors import Unbuilt, UserError, nearest, on_one_screen, report, shortened
from trainer.config.family import import_facts
from trainer.config.files import (
    COMMAND_LINE,
    DEFAULT,
    MAXTEXT_YML,
    POST_TRAIN,
    PRESETS,
    YmlFile,
    preset_names,
    read_chain,
    read_file,
    source_name,
)
from trainer.config.flags import removal
from trainer.config.from_model import defaults_from_model
from trainer.config.help import Question, explanation, help_text, question
from trainer.config.keys import Config
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.paths import path_problem
from trainer.config.prepared import of_prepared
from trainer.config.reader import Reader, Setting, merge
from trainer.config.scale import growth, scaled
from trainer.config.schema import Schema, schema
from trainer.config.trust import foreign_code

# The sections of base.yml whose keys are needed before the model is read: they determine how processes connect, and
# where they read and write.
_BEFORE_THE_MODEL = ("Run and output", "Several processes", "Ahead-of-time compilation")

_OF_COMMAND = "default of this command"  # the source of a setting


@dataclass(frozen=True)
class Loaded:
    """The configuration of a command line.

    Attributes:
      config: every key of base.yml with its value, not resolved: values such as `auto` and -1 remain. The model's sizes
        are already multiplied according to `global_parameter_scale`, which is therefore 1 in `config`.
      changed: the keys that the user's yml, the command line or the environment gives, each with its source.
      sources: the source of every key's value; see `files.source_name`.
      warnings: one line for each key that a file repeats, and for each given key that has no effect.
      notes: one line for each value that is interpreted differently from how it is written, and for each value of the
        preset that the user overrides.
      tokenizer: see `Description`.
    """

    config: Config
    changed: dict[str, str]
    sources: dict[str, str]
    warnings: list[str]
    notes: list[str]
    tokenizer: str = ""

    def unset(self, name: str) -> bool:
        """Returns whether a key's value is the default of base.yml or of the command."""
        return self.sources[name] in (DEFAULT, _OF_COMMAND)

    @property
    def measures(self) -> bool:
        """Whether the row length is derived from the data. This is the case if max_target_length is not set, and the
        model at load_parameters_path is fine-tuned on records or trained on its rollouts."""
        further = self.config.load_parameters_path and (
            has_rollouts(self.config) or any(self.config[key] for key in METHODS)
        )
        return bool(further and self.unset("max_target_length"))

    def complete(self, values: Mapping[str, Any]) -> None:
        """Replaces defaults by `values`, which come from the run's model and data.

        Raises:
          UserError: the values contradict other keys.
        """
        for name, value in values.items():
            setattr(self.config, name, value)
        self.sources.update(dict.fromkeys(values, "the model and the data"))
        if mistakes := contradictions(self.config, self.sources, set()):
            raise report(mistakes)


@dataclass(frozen=True)
class Description:
    """A checkpoint's information about its model.

    Attributes:
      keys: the model's keys, and tokenizer_path if the checkpoint has a tokenizer.
      where: the source of these keys.
      tokenizer: a folder with copies of the tokenizer's files, if tokenizer_path no longer has them; otherwise "".
      notes: lines for the user.
    """

    keys: Mapping[str, Any]
    where: str
    tokenizer: str = ""
    notes: Sequence[str] = ()


def load(
    argv: Sequence[str],
    source: str = COMMAND_LINE,
    environment: Mapping[str, str] | None = None,
    *,
    imports: bool = True,
    defaults: Mapping[str, Any] | None = None,
) -> Loaded:
    """Stage 1: returns the configuration of `argv`, the arguments after the module's name.

    Precedence, lowest first: base.yml; `defaults` of the command, and `from_model.FROM_A_MODEL`; maxtext.yml if it is
    the user's yml or one of its parents; the preset of model_name; the parents of the user's yml; the user's yml; the
    command line and, with equal rank, the variables M_KEY of `environment`. `source` names the source of `argv` in
    messages. `imports`: whether code that decoder_block names by import path may be imported; false for arguments from
    a checkpoint.

    Raises:
      UserError: lists all errors of the stage, one line each.
      SystemExit: with code 0, after the answer to --help or --explain; see `help`.
    """
    return _begin(argv, source, environment, defaults)._end(imports=imports)


def begin(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None
) -> "Begun":
    """Like `load`, for a command that takes the model from load_parameters_path if model_name is not given.

    Raises:
      UserError: like `load`; but if the model has to be read first, lists only errors that do not depend on the model.
      SystemExit: like `load`.
    """
    begun = _begin(argv, COMMAND_LINE, environment, defaults)
    if not begun.path:
        return replace(begun, loaded=begun._end())
    if mistakes := [*begun._reader.mistakes, *begun._foreign(), *begun._certain_contradictions()]:
        raise report(mistakes)
    return begun


def unchecked(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """Returns the settings of a command line, without the preset of model_name, before they are checked together."""
    return _begin(argv, COMMAND_LINE, environment, None).config


def _begin(
    argv: Sequence[str], source: str, environment: Mapping[str, str] | None, defaults: Mapping[str, Any] | None
) -> "Begun":
    if asked := question(argv):
        answer(asked, lambda words: {"": load(words, source, environment, defaults=defaults)})
        raise SystemExit(0)
    reader = Reader(schema())
    yml, words = split(argv)
    files, mistakes, notes = read_chain(yml, reader.schema)
    reader.mistakes += mistakes
    given: dict[str, Setting] = {}
    values = {key.name: Setting(copy.deepcopy(key.default), DEFAULT) for key in reader.schema.keys.values()}
    values |= {name: Setting(value, _OF_COMMAND) for name, value in (defaults or {}).items()}
    for file in files:
        settings = reader.file(file)
        if file.path == MAXTEXT_YML:
            values |= {name: Setting(own.value, MAXTEXT_YML.name) for name, own in settings.items()}
        else:
            given = merge(given, settings)
    by_hand, not_keys = read_by_hand(reader, words, source, environment or {})
    given = merge(given, by_hand)
    if any(file.path == MAXTEXT_YML for file in files):
        values |= _of_program(reader, values | given)
    preset = _preset(reader, (values | given)["model_name"])
    prepared = _prepared(reader, values | given, given)
    config = _config(merge(values | prepared, given))
    return Begun(config, given, reader, yml, files, values, preset, prepared, notes, not_keys)


@dataclass(frozen=True)
class Begun:
    """A command line whose arguments are read, but not yet checked together.

    Attributes:
      config: the defaults, overridden by the given keys; without the preset.
      given: the settings of the user's yml, of the command line and of its environment.
      loaded: the complete configuration if no model has to be read; otherwise None.
    """

    config: Config
    given: Mapping[str, Setting]
    _reader: Reader
    _yml: str
    _files: Sequence[YmlFile]
    _values: dict[str, Setting]
    _preset: dict[str, Setting]
    _prepared: dict[str, Setting]
    _notes: list[str]
    _not_keys: list[str]
    loaded: Loaded | None = None

    @property
    def path(self) -> str:
        """The checkpoint from which to read the model's keys; "" if they need not be read."""
        path = self.config.load_parameters_path
        known = "model_name" in self.given or self.config.load_full_state_path or path_problem(path)
        return "" if known or ("://" in path and not path.startswith("gs://")) else path

    def end(self, described: Description | None = None) -> Loaded:
        """Returns the checked configuration. `described` replaces the preset; None if the checkpoint does not describe
        a model.

        Raises:
          UserError: lists all errors, one line each.
        """
        return self.loaded or self._end(described)

    def _end(self, described: Description | None = None, *, imports: bool = True) -> Loaded:
        reader, files, given = self._reader, self._files, dict(self.given)
        preset = self._preset
        if described:
            preset = read_words(reader, as_words(described.keys), described.where)
        values = merge(merge(self._values, preset) | self._prepared, given)
        config = _config(values) if preset else self.config
        own = defaults_from_model(config)
        values |= {name: Setting(*own[name]) for name in own if values[name].where == DEFAULT}
        sized = scaled(values)
        if own or sized is not values:
            config = _config(sized)
        where = {name: setting.where for name, setting in sized.items()}
        reader.mistakes += _outgrown(reader.schema, values, sized)
        if code := self._foreign():  # reports code that untrusted files name before it is imported
            raise report([*reader.mistakes, *code])
        if imports:
            _import_facts(reader, config)
        reader.mistakes += contradictions(config, where, reader.broken)
        if "dataset_type" not in reader.broken:
            base = next((str(file.path) for file in files if file.is_maxtext), None)
            reader.mistakes += data_not_asked_for(config, where, self._changed, base)
        if reader.mistakes:
            raise report(reader.mistakes)
        theirs = [*reader.accepted, *reader.renamed]
        other_defaults = _other_defaults(self._yml, files, config, where, self._notes, theirs)
        notes = [*self._notes, *other_defaults]
        notes += described.notes if described else _changes(preset, values)
        notes += [*growth(values, sized), *verdicts.notes_of(reader.accepted), *reader.renamed]
        if notice := removal(config):
            notes.append(notice)
        warnings = [*(line for file in files for line in file.repeated), *_not_known(reader.unknown), *self._not_keys]
        warnings += [*without_effect(config, self._changed), *drifts(config)]
        sources = {name: source_name(source) for name, source in where.items()}
        tokenizer = described.tokenizer if described else ""
        return Loaded(config, self._changed, sources, on_one_screen(warnings), on_one_screen(notes), tokenizer)

    @property
    def _changed(self) -> dict[str, str]:
        return {name: setting.where for name, setting in self.given.items()}

    def _foreign(self) -> list[str]:
        chain = [file.path for file in reversed(self._files)]
        return foreign_code(self._reader.schema.keys, self.config, self._changed, chain)

    def _certain_contradictions(self) -> list[str]:
        """Returns the contradictions among keys in the sections `_BEFORE_THE_MODEL`. They do not depend on the
        model."""
        others = {key.name for key in self._reader.schema.keys.values() if key.section not in _BEFORE_THE_MODEL}
        where = {name: setting.where for name, setting in merge(self._values, dict(self.given)).items()}
        return contradictions(self.config, where, others | self._reader.broken)


def _of_program(reader: Reader, known: Mapping[str, Setting]) -> dict[str, Setting]:
    """Returns the settings that maxtext.yml adds for the post-training command that `known` selects; {} for other
    commands."""
    path = next((path for key, path in POST_TRAIN.items() if known[key].value), None)
    if path is None:
        return {}
    where = f"{MAXTEXT_YML.name}, {path.parent.name}/{path.name}"
    settings = reader.file(YmlFile(path, read_file(path)[0]))
    return {name: Setting(own.value, where) for name, own in settings.items()}


def _prepared(reader: Reader, known: Mapping[str, Setting], given: Mapping[str, Setting]) -> dict[str, Setting]:
    """Returns the settings of the folder at prepared_path; {} if prepared_path is empty or invalid."""
    path = known["prepared_path"].value
    if not path or "prepared_path" in reader.broken or path_problem(path):
        return {}
    settings, mistakes = of_prepared(path, known, given)
    reader.mistakes += mistakes
    return settings


def _config(settings: Mapping[str, Setting]) -> Config:
    return ml_collections.ConfigDict({name: setting.value for name, setting in settings.items()})


def _import_facts(reader: Reader, config: Config) -> None:
    """Imports the facts of a family that is given by import path. On failure, adds an error to `reader.mistakes`."""
    if "decoder_block" in reader.broken:
        return
    try:
        import_facts(config.decoder_block)
    except UserError as error:
        reader.mistakes.append(str(error))


def answer(asked: Question, load_sides: Callable[[Sequence[str]], Mapping[str, Loaded]]) -> None:
    """Prints the answer to --help or --explain. For a key, also prints its value in each configuration from
    `load_sides`.

    Raises:
      UserError: there is no such section or key; or the configuration has errors, after the key's text is printed.
    """
    if asked.section is not None:
        print(help_text(asked.section))
        return
    print(explanation(asked.key), flush=True)
    if asked.key not in schema().keys:
        return
    for side, loaded in load_sides(asked.words).items():
        name = asked.key
        print(
            f"  here{f' ({side})' if side else ''}: {name}={to_flow(loaded.config[name])}, from: {loaded.sources[name]}"
        )
        unread = loaded.config.load_parameters_path and "model_name" not in loaded.changed
        if unread and schema().keys[name].section == "Model" and name not in loaded.changed:
            print(f"  the model at load_parameters_path={loaded.config.load_parameters_path} may have another value")
        if reason := no_effect_of(loaded.config, name):
            print(f"  no effect here: {reason}")


def _outgrown(schema: Schema, values: dict[str, Setting], sized: dict[str, Setting]) -> list[str]:
    """Returns one line for each size that is out of range because of global_parameter_scale."""
    grown = {name: setting for name, setting in sized.items() if setting.value != values[name].value}
    checked = ((name, setting, schema.keys[name]) for name, setting in grown.items())
    return [
        f"{name}={setting.value} ({setting.where}): out of range; allowed: {key.allowed}"
        for name, setting, key in checked
        if not key.accepts(setting.value)
    ]


def _other_defaults(
    yml: str,
    files: Sequence[YmlFile],
    config: Config,
    where: Mapping[str, str],
    notes: Sequence[str],
    theirs: Sequence[Any],
) -> list[str]:
    """Returns notes on defaults that differ from MaxText's, if the user may expect MaxText's defaults: with MaxText's
    base.yml, with a preset, or with the user's own data. The result is a single line if the user gives neither a yml of
    MaxText (`notes` is empty) nor a key or value of MaxText (`theirs` is empty)."""
    base = [file for file in files if file.is_maxtext]
    own = config.model_name != "default" or config.dataset_type in OWN_KEYS
    if not (base or notes or own):
        return []
    inert = inert_keys(config)
    unset = [name for name, source in where.items() if source.startswith(DEFAULT) and name not in inert]
    differing = base_yml.differing(config, unset, next((key for key in POST_TRAIN if config[key]), ""))
    used = "is MaxText's base.yml: changes in it are used, all other keys have this trainer's defaults"
    begin = [f"{file.path} {used}{base_yml.tables(file.entries)}" for file in base]
    if not differing:
        return begin
    if not (base or notes or theirs):
        how = _how_to_use_them(yml, files)
        return [f"the defaults that apply differ from MaxText's (docs/from-maxtext.md); for MaxText's, {how}"]
    return [*begin, *differing, f"for MaxText's defaults {_how_to_use_them(yml, files)}"]


def _how_to_use_them(yml: str, files: Sequence[YmlFile]) -> str:
    children = [file for file in files if not file.is_maxtext]
    if children:
        return f"set base_config: maxtext.yml in {children[0].path}"
    if yml == "base.yml" and not files:
        return "give maxtext.yml as the first argument"
    changed = ", and your changes in it as key=value" if files else ""
    return f"give maxtext.yml instead of {shortened(yml)}{changed}"


def _not_known(names: Sequence[str]) -> list[str]:
    """Returns a list with one line about `names`, the unknown keys of a MaxText base.yml of another version; [] without
    such keys."""
    if not names:
        return []
    shown = f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
    return [f"ignored unknown keys of this MaxText base.yml: {shown}"]


def _preset(reader: Reader, model_name: Setting) -> dict[str, Setting]:
    name, known = model_name.value, preset_names()
    own = {"model_name": name} if name in known else verdicts.alias(name)
    if own is None:
        shown = f"model_name={shortened(name)} ({model_name.where})"
        allowed = f"there is no such preset; allowed: {', '.join(known)}{nearest(name, known)}"
        message = f"{shown}: {verdicts.on_preset(name) or allowed}"
        reader.mistakes.append(Unbuilt(message) if "not supported yet" in message else message)
    if own is None or name == "default":
        return {}
    path = PRESETS / f"{own['model_name']}.yml"
    entries, problem, _ = read_file(path)
    assert problem is None, problem
    differs = {key: Setting(value, f"preset {name}") for key, value in own.items() if key != "model_name"}
    return reader.file(YmlFile(path, entries)) | differs


def _changes(preset: dict[str, Setting], values: dict[str, Setting]) -> list[str]:
    """Returns one line for each key of the preset that the user overrides with another value."""
    name = values["model_name"].value
    return [
        f"model_name={name}: {key} {to_flow(old.value)} -> {to_flow(values[key].value)} ({values[key].where})"
        for key, old in preset.items()
        if values[key].value != old.value
    ]

"""Converts a MaxText command to this trainer's command, with a verdict for each key.

A word is an argument of a command, usually KEY=VALUE. The verdicts agree with those of `trainer.config.load`, because
both modules read each key with `Reader`. The only exceptions are the words in `Facts.maxtext_words`, which
`trainer.config.load` does not convert.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.config.capabilities.chat_keys import DISTILL, METHODS, SFT_DEFAULTS, other_command
from trainer.config.capabilities.data_keys import OWN_KEYS, without_rows
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS
from trainer.config.capabilities.rl_keys import RL_DEFAULTS
from trainer.config.effects import inert_keys, no_effect_of
from trainer.config.environment import PREFIX, variables
from trainer.config.errors import UserError, shortened
from trainer.config.family import facts_of
from trainer.config.files import DEFAULT, MAXTEXT_YML, file_of
from trainer.config.load import Loaded, load
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.schema import schema
from trainer.maxtext.command_line import Command, as_text
from trainer.maxtext.family_words import of_family
from trainer.maxtext.program import (
    COMMANDS,
    base_words,
    has_own_defaults,
    method_given,
    method_of,
    own_parent,
    own_words,
    program_yml,
    takes,
    unsaid,
    with_base,
)
from trainer.maxtext.rows import (
    DIFFERS,
    NO_EFFECT,
    SAME,
    UNKNOWN,
    Row,
    in_environment,
    is_known,
    refused,
    verdict_on,
)
from trainer.maxtext.shell_words import has_variable
from trainer.maxtext.version import NO_DATA, WITHOUT_LINEN, version_line, version_of, without_linen, yml_of

TRAIN, COMPILE, GENERATE, EXPORT = "trainer.train", "trainer.train_compile", "trainer.generate", "trainer.export"
PLAN = "trainer.plan"
SFT, DPO, GRPO = "trainer.sft", "trainer.dpo", "trainer.grpo"
_OF_DATA = (TRAIN, SFT, DPO, GRPO, DISTILL, COMPILE, PLAN)
SAME_WORDS = (*_OF_DATA, GENERATE)  # programs that accept MaxText's words, each with a verdict
_COMPILES = (COMPILE, PLAN)  # programs that read no data
_OF_TEXT = ("tokenizer_path", "tokenizer_type", "add_bos", "add_eos")  # data keys that generation also reads
_EXAMPLE = re.compile(r"needs (?:\w+|files|a file), such as (\w+=\S+?)(?:;|$)")
_LENGTH = "max_target_length="
_OF_PAIR = (
    "the length of both sequences of a pair together, while MaxText's is the length of each: give twice the value"
)
# The defaults of programs, where they differ from base.yml's.
_DEFAULTS: dict[str, Mapping[str, Any]] = {
    SFT: SFT_DEFAULTS,
    DPO: DPO_DEFAULTS,
    GRPO: RL_DEFAULTS,
    DISTILL: {"use_distill": True},
}
# The keys that a program's command must contain, with examples.
_NEEDED = {
    **dict.fromkeys(_COMPILES, ("compile_topology=v5e-16",)),
    DISTILL: ("teacher_path=/models/teacher",),
    GENERATE: ("load_parameters_path=/models/checkpoint/0/items", "tokenizer_path=/models/tokenizer.model"),
}


class Program(NamedTuple):
    """How a MaxText program is handled.

    Attributes:
      runs: our equivalent program; "" if there is none.
      why: if there is no equivalent program, why not, or what to use instead.
    """

    runs: str
    why: str


class Conversion(NamedTuple):
    """A converted command.

    Attributes:
      words: the words of our command, preceded by its environment variables.
      rows: the verdicts, in the order of the command.
      problems: problems of the whole command, not of single rows.
      notes: the notes about the command, other than verdicts, that `trainer.train` prints when it starts.
      loaded: the configuration; None if there are problems.
      version: a line on the consequences of MaxText's version for the command.
    """

    words: list[str]
    rows: list[Row]
    problems: list[str]
    notes: list[str]
    loaded: Loaded | None = None
    version: str = ""

    @property
    def runs(self) -> bool:
        """Whether the configuration of the command can be loaded."""
        return not self.problems and not any(row.problem for row in self.rows)


def program(module: str) -> Program | None:
    """Returns how MaxText's program `module` is handled; None if there is no such program.

    A `module` of "" means training.
    """
    last = re.split(r"[./]", module)[-1] or "train"
    if has_variable(last):  # a variable that chooses train or train_compile
        last = "train"
    for row in verdicts.table()["modules"]:
        if last in row["names"]:
            return Program(row.get("runs", ""), row.get("why", ""))
    return None


def programs() -> list[str]:
    """Returns the last part of the name of every MaxText program that `program` knows."""
    return [name for row in verdicts.table()["modules"] for name in row["names"]]


def convert(command: Command, runs: str, version: str = "") -> Conversion:
    """Returns our command for `command`.

    Args:
      runs: our equivalent program, one of `SAME_WORDS`; or `EXPORT`, to check the keys of a checkpoint conversion.
      version: one of `version.versions()`; "" to infer it from the keys.
    """
    found = _convert(command, runs, version)
    facts = facts_of(found.loaded.config) if found.loaded else None
    if found.loaded is None or facts is None or facts.maxtext_layers == 1:
        return found
    return _with_our_layers(found, found.loaded, facts.maxtext_layers, command, runs, version)


def _with_our_layers(
    found: Conversion, loaded: Loaded, times: int, command: Command, runs: str, version: str
) -> Conversion:
    """Returns `found` with our number of layers, for a model in which MaxText counts `times` layers as one."""
    said, source = f"layers; MaxText counts {times} of them as one", loaded.sources["base_num_decoder_layers"]
    given = [word for word in command.words if word.startswith("base_num_decoder_layers=")]
    if source.startswith("preset ") and not given:
        return found
    if any(has_variable(word) for word in given):
        return found._replace(problems=[*found.problems, f"{given[-1]}: the number of {said}: give {times} times it"])
    if file_of(source) not in (None, MAXTEXT_YML):
        problem = (
            f"{source}: base_num_decoder_layers is the number of {said}: give {times} times it on the command line"
        )
        return found._replace(problems=[*found.problems, problem])
    ours = f"base_num_decoder_layers={times * loaded.config.base_num_decoder_layers}"
    variables_left = {
        name: text for name, text in command.environment.items() if name != f"{PREFIX}BASE_NUM_DECODER_LAYERS"
    }
    words = [word for word in command.words if word not in given]
    found = _convert(command._replace(words=[*words, ours], environment=variables_left), runs, version)
    theirs = given[-1] if given else f"base_num_decoder_layers={loaded.config.base_num_decoder_layers}"
    rows = [Row(theirs, DIFFERS, f"{ours}: {said}", ours) if row.given == ours else row for row in found.rows]
    return found._replace(rows=rows)


def _convert(command: Command, runs: str, version: str) -> Conversion:
    environment, unknown = variables(command.environment)
    kept = [f"{name}={text}" for name, text in command.environment.items() if not name.startswith(PREFIX)]
    rows = [verdict_on(name, text, f"{variable}={text}", variable) for name, (variable, text) in environment.items()]
    rows += [Row(line.partition(" in ")[0], UNKNOWN, line.partition(": ")[2], "") for line in unknown]
    rows += [verdict_on(word.partition("=")[0], word.partition("=")[2], word) for word in command.words]
    if runs in (GENERATE, EXPORT):
        rows = [_without_data(row, runs) for row in rows]
    yml = yml_of(command.yml)
    texts = {name: text for name, (_, text) in environment.items()}
    rows = of_family(rows, {**yml.given} | texts | dict(word.partition("=")[::2] for word in command.words))
    written = [(row, row.word) for row in rows if row.word]
    assigned = [word for row, word in written if in_environment(row)]
    given = {**yml.given} | texts | dict(word.partition("=")[::2] for _, word in written)
    names = [*yml.names, *environment, *(word.partition("=")[0] for word in command.words)]
    version = version or version_of(names)
    method = method_of(runs)
    own_yml = method if has_own_defaults(yml, command.yml, method) else ""
    method = method or (method_given(given) if runs in (TRAIN, *_COMPILES) else "")
    runs = METHODS[method][0] if method and runs == TRAIN else runs
    if runs == DPO:
        rows = _of_pairs(rows, yml.given)
    says_data = runs not in _OF_DATA or bool(own_yml) or "dataset_type" in given
    says_data |= "dataset_type" in yml.names and yml.name != MAXTEXT_YML.name
    added = without_linen([*yml.names, *given], says_data) if version == WITHOUT_LINEN and runs in SAME_WORDS else []
    added += _implied(given | dict(word.split("=") for word in added), runs, own_yml)
    if method and (own_yml or yml.name == MAXTEXT_YML.name):
        of_program, more = _of_program(command, method, own_yml, given, added)
        if yml.below:
            more.append(Row(command.yml, DIFFERS, own_parent(yml, method, runs, given), ""))
        rows, added = [*rows, *more], [*added, *of_program]
    rows = _with_preset(rows, given)
    words = [*added, *(word for row, word in written if not in_environment(row))]
    checked = [word for word in words if is_known(word) and not word.startswith("-")]  # without options such as --help
    if any(has_variable(given.get(name, "")) for name in ("dataset_type", "compile_topology")):
        checked.append(NO_DATA)
    if runs == EXPORT:
        checked += [f"{name}={value}" for name, value in without_rows(checked).items()]
    assigned_variables = dict(word.partition("=")[::2] for word in assigned if is_known(word))
    loaded, problems, rows = _loaded(yml.name, checked, assigned_variables, runs, rows)
    notes: list[str] = []
    if (theirs := program_yml(yml.below or command.yml)) and theirs != method:
        problems.append(f"{shortened(command.yml)} has the values of {COMMANDS[theirs]}, and the program is {runs}")
    problems = _completed(problems, loaded.config.to_dict() if loaded else given, runs)
    if loaded is not None:
        notes = [note for note in loaded.notes if not note.startswith(("MaxText's ", yml.name))]
        rows = [_with_effect(row, loaded, runs) for row in rows]
    about = version_line(version, says_data, loaded) if runs in SAME_WORDS else ""
    if own_yml and not command.yml:
        about = ". ".join(filter(None, [about, takes(method, runs)]))
    return Conversion([*kept, *assigned, "python", "-m", runs, yml.name, *words], rows, problems, notes, loaded, about)


def _of_pairs(rows: Sequence[Row], in_yml: Mapping[str, str]) -> list[Row]:
    """Returns `rows`, with an explanation of max_target_length, which for pairs has another meaning than in MaxText.

    If the yml sets the key (`in_yml`), a row is added for it.
    """
    said = [f"{_LENGTH}{text}" for name, text in in_yml.items() if f"{name}=" == _LENGTH]
    return [
        *(
            row._replace(kind=DIFFERS, text=_OF_PAIR) if row.kind == SAME and row.word.startswith(_LENGTH) else row
            for row in rows
        ),
        *(Row(word, DIFFERS, _OF_PAIR, "") for word in said),
    ]


def _of_program(
    command: Command, method: str, own_yml: str, given: Mapping[str, str], added: Sequence[str]
) -> tuple[list[str], list[Row]]:
    """Returns the words to add for values that a command implies, and the rows that explain such values; see
    `maxtext.program`.

    `method`: the key that selects the command's program, such as use_sft. `own_yml`: `method` if the program's yml
    determines the defaults; otherwise "". `added`: the words that the conversion has added so far.
    """
    if own_yml:
        return [], [Row(word, DIFFERS, why, "") for word, why in unsaid(own_yml, given).items()]
    words = base_words(method, {**given} | dict(word.split("=") for word in added))
    if not words:
        return [], []
    names = ", ".join(word.partition("=")[0] for word in words)
    return words, [Row(command.yml or "base.yml", DIFFERS, f"its values of {names} are added", "")]


def _loaded(
    yml: str, words: Sequence[str], environment: Mapping[str, str], runs: str, rows: Sequence[Row]
) -> tuple[Loaded | None, list[str], list[Row]]:
    """Returns the configuration, the problems of the whole command, and `rows` with the problem of each key.

    The configuration is None if it cannot be loaded.
    """
    try:
        # Nothing is imported, because the command is only translated, not run.
        loaded = load([yml, *words], environment=environment, imports=False, defaults=_DEFAULTS.get(runs))
    except UserError as error:
        lines = str(error).split("\n  ")
        rows = [refused(row, [line for line in lines if not _EXAMPLE.search(line)]) for row in rows]
        told = {row.problem for row in rows}
        return None, [line for line in lines[1:] or lines if line not in told], list(rows)
    problems = _other_defaults(yml, loaded, method_of(runs))
    if runs == DISTILL:
        own = "use_sft" if loaded.config.use_sft else ""
        problems += filter(None, [other_command(loaded.config, own, distills=True)])
    elif runs not in (*_COMPILES, GENERATE, EXPORT):
        problems += filter(None, [other_command(loaded.config, method_of(runs))])
    return loaded, problems, list(rows)


def _other_defaults(yml: str, loaded: Loaded, method: str) -> list[str]:
    """Returns a list of one problem if keys that the command does not set have defaults that differ from MaxText's,
    otherwise []."""
    inert = inert_keys(loaded.config)
    unset = [name for name, source in loaded.sources.items() if source.startswith(DEFAULT) and name not in inert]
    lines = base_yml.differing(loaded.config, unset, "")
    advice = "write base_config: maxtext.yml in it; or give maxtext.yml instead, and its changes as key=value"
    if method:
        given = {name: "" for name, source in loaded.sources.items() if not source.startswith(DEFAULT)}
        advice += f"; {with_base(method, given)}"
    return [f"{yml}: {advice}. {'. '.join(lines)}"] if lines else []


def _implied(given: Mapping[str, str], runs: str, own_yml: str) -> list[str]:
    """Returns words that make MaxText's implicit behaviour explicit in our command. `own_yml`: see `_of_program`."""
    without_data = runs in (GENERATE, EXPORT)
    kind = given.get("dataset_type", "hf" if own_yml else "")
    added = [NO_DATA] if without_data else []
    added += own_words(own_yml, given)
    given = {**given} | dict(word.split("=") for word in added)
    added += preset_words(given)
    if runs == EXPORT or (kind == "synthetic" and not without_data):
        return added
    if (kind == "hf" and not without_data) or given.get("model_name") in verdicts.table()["tokenizers"]:
        own_type = "tokenizer_type=huggingface"  # MaxText's default for its hf pipeline and for these presets
        added += [] if "tokenizer_type" in given else [own_type]
    elif "tokenizer_llama3.tiktoken" in given.get("tokenizer_path", ""):
        added.append("tokenizer_type=tiktoken")
    return list(dict.fromkeys(added))


def preset_words(given: Mapping[str, str]) -> list[str]:
    """Returns words for the values in which MaxText's preset differs from our preset (the published model).

    `given`: the keys that are already set, for which no words are returned.
    """
    words = [
        word
        for pattern, words in verdicts.table()["of_presets"].items()
        if fnmatch.fnmatchcase(given.get("model_name", ""), pattern)
        for word in words
    ]
    return [word for word in words if word.partition("=")[0] not in given]


def _with_preset(rows: Sequence[Row], given: Mapping[str, str]) -> list[Row]:
    """Returns `rows` with an explanation of `preset_words` in the row of model_name. The row is added if it is
    missing."""
    if not (words := preset_words(given)):
        return list(rows)
    text = f"the published model; MaxText's has {' '.join(words)}, added here: leave it out to run the published model"
    name = f"model_name={given['model_name']}"
    if all(row.word != name for row in rows):
        return [*rows, Row(name, DIFFERS, text, "")]
    return [row._replace(kind=DIFFERS, text=text) if row.word == name and row.kind == SAME else row for row in rows]


def _completed(problems: Sequence[str], given: Mapping[str, object], runs: str) -> list[str]:
    """Returns `problems`, with those about missing values merged into one that lists all keys without a value.

    MaxText has defaults for these keys, so its commands may omit them.
    """
    missing = [word for word in _NEEDED.get(runs, ()) if not given.get(word.partition("=")[0])]
    examples = [_EXAMPLE.search(line) for line in problems]
    others = [line for line, example in zip(problems, examples, strict=True) if example is None]
    if runs not in _COMPILES or not missing:
        missing += [example.group(1) for example in examples if example]
    if not missing:
        return others
    missing = list(dict.fromkeys(missing))
    names = ", ".join(word.partition("=")[0] for word in missing)
    instead = f", or {NO_DATA} for data without files" if runs == TRAIN else ""
    return [*others, f"the command does not contain {names}; with your own values add {as_text(missing)}{instead}"]


def _without_data(row: Row, runs: str) -> Row:
    """Returns `row`, marked as needless if its key is about data, because the program `runs` reads no data."""
    name = row.given.partition("=")[0]
    if name == "dataset_type" or any(name in keys for keys in OWN_KEYS.values()):
        return Row(row.given, verdicts.NEEDLESS, f"{runs} reads no data", "")
    return row


def _with_effect(row: Row, loaded: Loaded, runs: str) -> Row:
    """Returns `row`, with the reason added if the row's key has no effect in this configuration."""
    name = row.word.partition("=")[0]
    reason = no_effect_of(loaded.config, name) if row.kind in (SAME, DIFFERS) and name in loaded.changed else None
    if not reason:
        return row
    of_prompts = runs == GENERATE and (name in _OF_TEXT or schema().keys[name].section == "Generation")
    if of_prompts and reason.startswith(NO_DATA):  # `_implied` added NO_DATA
        return row
    return row._replace(kind=NO_EFFECT, text=reason)

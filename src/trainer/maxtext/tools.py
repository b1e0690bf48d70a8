"""Converts MaxText commands, including those of MaxText's tools.

`trainer.export` and `trainer.inspect` take the place of the tools, but have different arguments. So a template of the
complete command is filled with the values of the tool's arguments.
"""

import itertools
import re
from collections.abc import Mapping

from trainer.config.capabilities.chat_keys import DISTILL
from trainer.config.dump import to_flow
from trainer.config.effects import no_effect_of
from trainer.config.environment import variables
from trainer.config.errors import shortened
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.scale import factors
from trainer.config.schema import schema
from trainer.maxtext import distill_command
from trainer.maxtext.command_line import Command
from trainer.maxtext.convert import EXPORT, SAME_WORDS, Conversion, convert, preset_words
from trainer.maxtext.parameters import of_parameters
from trainer.maxtext.rows import DECIDING, DIFFERS, SAME, STOPPING, Row, unchecked
from trainer.maxtext.shell_words import has_variable


def converted(command: Command, runs: str, version: str = "") -> Conversion:
    """Returns our command for `command`. `runs`: our equivalent program, or a template of our complete command.

    `version`: see `convert`.
    """
    if runs == DISTILL:
        return distill_command.converted(command, version)
    return convert(command, runs, version) if runs in SAME_WORDS else _filled(command, runs)


def _filled(command: Command, template: str) -> Conversion:
    """Fills MaxText's values into the command `template`. Placeholders without a value become names in capitals."""
    # trainer.export does not read the environment, so variables become arguments.
    known, _ = variables(command.environment)
    command = command._replace(words=[*command.words, *(f"{name}={text}" for name, (_, text) in known.items())])
    given = {name.lstrip("-"): text for name, _, text in (word.partition("=") for word in command.words)}
    # MaxText's tools also accept options whose value is the next word.
    given |= {name[2:]: text for name, text in itertools.pairwise(command.words) if re.fullmatch(r"--\w+", name)}
    lacking: list[str] = []

    def value(match: re.Match[str]) -> str:
        names, _, default = match.group(1).partition(":")
        text = next((given[name] for name in names.split("|") if given.get(name)), default)
        if not text:
            lacking.append(names.split("|")[-1].upper())
        return text or lacking[-1]

    words = [re.sub(r"{([^{}]+)}", value, word) for word in template.split()]
    names = {name for choice in re.findall(r"{([^:{}]+)", template) for name in choice.split("|")}
    rows: list[Row] = []
    problems: list[str] = []
    if words[0] == EXPORT:
        own = [word for word in command.words if re.match(r"[^-]*=", word)]
        own = [word for word in own if (name := word.partition("=")[0]) not in names or name in schema().keys]
        made = convert(Command("", {}, "", own), EXPORT)
        rows, problems = [row for row in made.rows if row.kind in STOPPING], [*made.problems]
        if "load_parameters_path" in names:  # a MaxText checkpoint does not describe its model
            words += _model_words(made, "" if "model_name" in names else given.get("model_name", ""), given)
        for word in words[3:]:
            if word.startswith("dtype=") and word not in ("dtype=float32", "dtype=bfloat16") and not has_variable(word):
                problems.append(f"{shortened(word)}: {EXPORT} writes float32 or bfloat16")
        problems += [
            f"{shortened(given[name])}: an adapter is exported with its base: {EXPORT} ADAPTER OUT format=hf "
            "load_parameters_path=BASE merges them, format=peft writes the adapter alone"
            for name in ("lora.lora_restore_path", "hf_lora_adapter_path")
            if given.get(name)
        ]
        if "://" in words[2]:
            problems.append(f"{shortened(words[2])}: {EXPORT} writes to a local folder; give one")
    if lacking:
        problems.append(f"give {' and '.join(lacking)}, which the command does not contain")
    used = {*words, *(given[name] for name in names if name in given), *(row.given for row in rows)}
    unused = [word for word in command.words if word not in used and word.partition("=")[0].lstrip("-") not in names]
    hidden = [word for word in unchecked(unused) if word.startswith(DECIDING)]
    why = "not checked, as a shell replaces the value"
    rows += [Row(word, verdicts.NEEDLESS, why if word in hidden else "", "") for word in unused]
    return Conversion(["python", "-m", *words], rows, problems, [])


def _model_words(made: Conversion, preset: str, given: Mapping[str, str]) -> list[str]:
    """Returns words for the keys that define the parameters of the model that `made` configures."""
    said = {row.word.partition("=")[0]: row for row in made.rows if row.kind in (SAME, DIFFERS, verdicts.RENAMED)}
    wanted = [name for name in said if of_parameters(name)]
    sizes = factors(8) if given.get("global_parameter_scale", "1") != "1" else {}
    if made.loaded is not None:
        others = [*base_yml.defaults()] if given.get("model_name", "default") == "default" else []
        wanted += [
            key for key in [*others, *sizes] if of_parameters(key) and no_effect_of(made.loaded.config, key) is None
        ]
        # MaxText's tools write the published config.json even where MaxText's preset differs from the published model.
        # Only the vocabulary size must be the preset's, because it determines shapes.
        wanted += [name for word in preset_words(given) if (name := word.partition("=")[0]) == "vocab_size"]
    words = [f"model_name={preset}"] if preset not in ("", "default") else []
    for key in dict.fromkeys(wanted):
        if made.loaded is None or (key in said and (key not in sizes or has_variable(said[key].word))):
            words.append(said[key].word)
        else:
            words.append(f"{key}={to_flow(made.loaded.config[key])}")
    return words

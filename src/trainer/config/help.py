"""The texts of --help and --explain. They document a key by its comment in base.yml and the values that it accepts."""

import difflib
import itertools
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.dump import to_flow
from trainer.config.errors import UserError, nearest, shortened
from trainer.config.files import YML_ENDINGS, preset_names
from trainer.config.maxtext import verdicts
from trainer.config.schema import Key, plain_name, schema

_HELP, _EXPLAIN, _ALL = ("help", "--help", "-h"), "--explain", "all"
_WIDTH = 116

# The commands that accept the keys of training, each with its options and its description.
_COMMANDS = {
    "train": ("[--dry-run]", "Trains a language model."),
    "sft": ("[--dry-run | --show N]", "Fine-tunes a language model on conversations."),
    "dpo": ("[--dry-run | --show N]", "Trains a language model to prefer one answer to another."),
    "distill": ("[--dry-run | --show N]", "Trains a language model on the distribution of a larger one, its teacher."),
    "grpo": ("[--dry-run]", "Improves a language model by its own answers, which reward functions judge."),
    "prepare": (
        "out=FOLDER [beam=OPTIONS]",
        "Tokenizes and packs data in several processes, or with Apache Beam, for prepared_path=FOLDER.",
    ),
    "train_compile": ("", "Compiles the training step for compile_topology; reports memory, FLOPs and time."),
    "plan": (
        "[search.KEY=A,B ...] [objective=batch] [global_batch_tokens=N] [compiles=N] [journal=FILE] [--json]",
        "Finds the mesh, batch and rematerialization that fit compile_topology and are fastest.",
    ),
    "shardings": ("[left.key=value ... right.key=value ...] [--json]", "Prints the sharding of every tensor."),
}
_OPTIONS = {
    "--dry-run": "stops before the first step; prints what the command would run, and what a step needs",
    "--show N": "prints the first N records of the training data, and marks the text that is trained on",
    "--json": "prints the tables as JSON",
}
_HEAD = """\
usage: python -m trainer.{command} [FILE.yml] [key=value ...] {options}
       python -m trainer.{command} [...] --help [SECTION | all]
       python -m trainer.{command} [...] --explain KEY

{does}

--help SECTION   prints the keys of one section with their meaning; --help all: of every section
--explain KEY    prints one key's meaning, its value in this command, and the source of this value
{lines}
FILE.yml is any YAML file with `base_config: base.yml`, or with another such file as its base_config. Without it, or
with base.yml, the defaults of base.yml apply. Precedence, lowest first: these defaults, the preset of model_name,
FILE.yml, key=value. An environment variable M_KEY=value is the same as key=value. Lists are written [a,b].
Presets of model_name: {presets}."""


class Question(NamedTuple):
    """A --help or --explain option in a command line: about a section or, if `section` is None, about a key. The
    section "" means the list of sections."""

    section: str | None
    key: str
    words: list[str]  # the other arguments


def question(argv: Sequence[str]) -> Question | None:
    """Returns the --help or --explain option in a command line; None without such an option.

    Raises:
      UserError: no key follows --explain.
    """
    for i, word in enumerate(argv):
        option, equals, text = word.partition("=")
        before, after = list(argv[:i]), list(argv[i + 1 :])
        if word in _HELP or (equals and option == "--help"):
            names = list(itertools.takewhile(_is_plain, after))
            return Question(text or " ".join(names), "", before + after[len(names) :])
        if option == _EXPLAIN:
            key = text.partition("=")[0] if equals else after.pop(0) if after else ""
            if not key:
                raise UserError("--explain needs the name of a key, such as --explain steps; --help lists the keys")
            name, setting, _ = key.partition("=")
            return Question(None, name.lstrip("-"), before + ([key] if setting else []) + after)
    return None


def _is_plain(word: str) -> bool:
    return "=" not in word and not word.startswith("-") and not word.endswith(YML_ENDINGS)


def answers_question(words: Sequence[str], usage: str) -> bool:
    """Answers --help or --explain in a command line: prints `usage`, a section of keys, or a key.

    Returns:
      Whether the command line has one of these options.

    Raises:
      UserError: there is no such section or key.
    """
    if (asked := question(words)) is None:
        return False
    print(explanation(asked.key) if asked.key else help_text(asked.section) if asked.section else usage)
    return True


def prints_usage(command: str, words: Sequence[str]) -> bool:
    """Prints the usage of `command`, one of `_COMMANDS`, if `words` have --help without a section.

    Returns:
      Whether the usage was printed.
    """
    asked = question(words)
    if asked is None or asked.section != "":
        return False
    print(help_text(command=command))
    return True


def help_text(section: str = "", command: str = "train") -> str:
    """Returns the usage of `command` with the names of all keys by section, or the text of base.yml about one section
    or every section ("all").

    Raises:
      UserError: there is no such section.
    """
    if not section:
        options, does = _COMMANDS[command]
        lines = "".join(f"{name:<17}{text}\n" for name, text in _OPTIONS.items() if name in options)
        presets = ", ".join(preset_names())
        head = _HEAD.format(command=command, options=options, does=does, lines=lines, presets=presets)
        return "\n".join(
            [textwrap.fill(line, _WIDTH) if len(line) > _WIDTH else line.rstrip() for line in head.split("\n")]
            + _index()
        )
    asked = None if section.lower() == _ALL else _section(section)
    parts = [line for name, keys in _sections().items() if asked in (None, name) for line in _in_full(name, keys)]
    return "\n".join(parts).strip()


def explanation(name: str) -> str:
    """Returns the text of base.yml about the key `name`, or how this trainer treats the key `name` of MaxText.

    Raises:
      UserError: there is no such key.
    """
    key = schema().keys.get(plain_name(name))
    if key is not None:
        doc = [f"  {line}".rstrip() for line in key.doc.splitlines()]
        values = [f"  allowed: {key.allowed}", f"  default: {to_flow(key.default)}"]
        return "\n".join([f"{name}  (section {key.section})", *doc, *values])
    verdict = verdicts.find(name)
    if verdict is None:
        near = nearest(name, schema().keys) or nearest(name, verdicts.verdicts())
        raise UserError(f"--explain {shortened(name)}: there is no such key{near}; --help lists the keys")
    instead = f"; write {verdict.to}" if verdict.to else ""
    return f"{name}  (a key of MaxText)\n  {verdict.kind}: {verdict.why}{instead}"


def _sections() -> dict[str, list[Key]]:
    sections: dict[str, list[Key]] = {}
    for key in schema().keys.values():
        sections.setdefault(key.section, []).append(key)
    return sections


def _index() -> list[str]:
    lines = []
    for section, keys in _sections().items():
        names = textwrap.fill(", ".join(key.name for key in keys), _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += ["", section, names]
    return lines


def _section(asked: str) -> str:
    """Returns the section whose name starts with `asked`, contains it as a word, or is similar to it."""
    names, word = list(_sections()), asked.lower().strip()
    starting = [name for name in names if name.lower().startswith(word)]
    holding = [name for name in names if word in name.lower().split()]
    lower = {name.lower(): name for name in names}
    firsts = {name.lower().split()[0]: name for name in names}
    close = [(lower | firsts)[known] for known in difflib.get_close_matches(word, lower | firsts, n=1, cutoff=0.7)]
    if matching := [*starting, *holding, *close]:
        return matching[0]
    key = f"; {asked} is a key: --explain {asked}" if asked in schema().keys else ""
    raise UserError(f"--help {shortened(asked)}: there is no such section; the sections: {', '.join(names)}{key}")


def _in_full(section: str, keys: Sequence[Key]) -> list[str]:
    parts = [f"\n---- {section} ".ljust(100, "-")]
    if intro := schema().intros.get(section):
        parts.append(intro)
    for doc, group in itertools.groupby(keys, lambda key: key.doc):
        parts += ["", *(f"  {line}".rstrip() for line in doc.splitlines()), *map(_line, group)]
    return parts


def _line(key: Key) -> str:
    default = f"{key.name}={to_flow(key.default)}"
    return f"{default:<52}  {key.allowed}" if len(default) <= 52 else f"{default}\n{'':<52}  {key.allowed}"

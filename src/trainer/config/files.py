"""Reads YAML files of keys: the user's file, its parents and the presets."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainer.config.errors import shortened
from trainer.config.maxtext.verdicts import find, is_base, is_prefix, verdicts
from trainer.config.paths import path_problem
from trainer.config.plain_yaml import compose, describe, flatten, read_text, repeated_keys
from trainer.config.schema import BASE_YML, GROUPS, Schema, schema

PRESETS = Path(__file__).parent / "models"
# The sources of settings that come from no file. Other sources are FILE:LINE.
COMMAND_LINE, DEFAULT = "command line", "default"
ENVIRONMENT = "environment variable "  # followed by the name of the variable
YML_ENDINGS = (".yml", ".yaml")
MAXTEXT_YML = Path(__file__).parent / "maxtext" / "maxtext.yml"
# Maps each key that selects a post-training command to the file whose settings maxtext.yml adds for this command.
# If several of these keys are true, the first one selects the command. The files are named as in MaxText.
POST_TRAIN = {
    key: Path(__file__).parent / "maxtext" / "post_train" / f"{name}.yml"
    for key, name in (("use_distill", "distillation"), ("use_sft", "sft"), ("use_dpo", "dpo"), ("use_grpo", "rl"))
}
# Paths of files in a MaxText checkout.
_MAXTEXT_BASE = re.compile(r"(.*/)?maxtext/configs/+base\.yml", re.IGNORECASE)
_MAXTEXT_POST_TRAIN = re.compile(
    r"((.*/)?maxtext/configs/+)?(post_train/(distillation|sft|dpo|rl)\.yml)", re.IGNORECASE
)


@dataclass(frozen=True)
class Entry:
    """One key of a file. `given` is the text of its value; `where` is the file and line."""

    name: str
    node: yaml.Node
    given: str
    where: str


@dataclass(frozen=True)
class YmlFile:
    """The entries of a file, in order and without base_config. A root file has no parent and sets every key."""

    path: Path
    entries: list[Entry]
    is_root: bool = False
    is_maxtext: bool = False  # whether it is a version of MaxText's base.yml, which is a root file
    repeated: Sequence[str] = ()  # a message for each key that the file gives more than once


def file_of(where: str) -> Path | None:
    """Returns the file of a source FILE:LINE; None for any other source."""
    path, _, line = where.rpartition(":")
    return Path(path) if path and line.isdecimal() else None


def by_hand(where: str) -> bool:
    """Returns whether a setting was given with the command: as an argument or in the environment."""
    return where == COMMAND_LINE or where.startswith(ENVIRONMENT)


def source_name(where: str) -> str:
    """Returns a source in words: `default`, `preset NAME`, FILE:LINE, the command line or a variable."""
    path = file_of(where.partition(",")[0])
    return where.replace(str(path), f"preset {path.stem}", 1) if path and path.parent == PRESETS else where


def is_maxtexts_base(name: str) -> bool:
    """Returns whether `name` has the form of a path to base.yml in a MaxText checkout, but no such file exists."""
    return _MAXTEXT_BASE.fullmatch(name) is not None and not Path(name).is_file()


def post_train_name(name: str) -> str:
    """Returns post_train/NAME.yml if `name` is the path of one of MaxText's post-training files; otherwise ""."""
    match = _MAXTEXT_POST_TRAIN.fullmatch(name)
    return match.group(3).lower() if match else ""


@functools.cache
def preset_names() -> tuple[str, ...]:
    """Returns all values of model_name."""
    return ("default", *sorted(path.stem for path in PRESETS.glob("*.yml")))


def read_chain(name: str, schema: Schema) -> tuple[list[YmlFile], list[str], list[str]]:
    """Reads the file that a command line names, and its parents.

    Returns:
      The files (the topmost parent first, without the packaged base.yml), the errors, and the notes.
    """
    files: list[YmlFile] = []
    mistakes: list[str] = []
    notes: list[str] = []
    wanted, where, folder = name, COMMAND_LINE, Path()
    while True:
        path = _find(wanted, folder, [file.path for file in files])
        if path is None:
            key = "" if where == COMMAND_LINE else "base_config="
            mistakes.append(f"{key}{shortened(wanted)} ({where}): {_why_not_found(wanted, folder)}")
            break
        if path == MAXTEXT_YML and (of_program := post_train_name(wanted)):
            notes.append(
                f"{shortened(wanted)}: using maxtext.yml, which adds the values of {of_program} in its command"
            )
        if path == BASE_YML:
            if wanted != "base.yml" and _MAXTEXT_BASE.fullmatch(wanted) and not (folder / wanted).is_file():
                notes.append(f"{shortened(wanted)} does not exist here: using the packaged base.yml")
            break
        if path.resolve() in [file.path.resolve() for file in files]:
            mistakes.append(f"base_config={wanted} ({where}): the file is its own parent")
            break
        entries, problem, repeated = read_file(path)
        parent = _take_parent(entries)
        is_maxtext = parent is None and _is_maxtext(entries, schema)
        files.append(YmlFile(path, entries, parent is None, is_maxtext, repeated))
        if problem:
            mistakes.append(problem)
        elif parent is None and not is_maxtext:
            mistakes += _missing(path, {entry.name for entry in entries}, schema)
        if parent is None:
            break
        wanted, where, folder = parent.given, parent.where, path.parent
    return files[::-1], mistakes, notes


def read_file(path: Path) -> tuple[list[Entry], str | None, list[str]]:
    """Returns the entries of the YAML file `path`, an error if any, and a message for each repeated key."""
    try:
        text = read_text(path)
        node = compose(text)
        repeated: list[str] = []
        if isinstance(node, yaml.MappingNode):
            entries = _entries(path, text, node, repeated)
    except OSError as error:
        return [], f"{path}: cannot be read: {error.strerror}", []
    except UnicodeDecodeError:
        return [], f"{path}: not UTF-8 text", []
    except yaml.YAMLError as error:
        return [], describe(error, str(path)), []
    if node is None:
        return [], None, []
    if not isinstance(node, yaml.MappingNode):
        return [], f"{path}: not a mapping of `key: value` lines", []
    return entries, None, repeated


def _entries(path: Path, text: str, node: yaml.MappingNode, repeated: list[str], prefix: str = "") -> list[Entry]:
    """Returns the entries of `node`, and adds messages to `repeated`.

    Entries of a MaxText group, such as `lora: {lora_rank: 8}`, get their command-line names.
    """
    repeated += [
        f"{path}:{lines[-1]}: {shortened(prefix + key)} is given {len(lines)} times, first in line {lines[0]}; "
        "the last one wins"
        for key, lines in repeated_keys(node).items()
    ]
    flatten(node)
    entries: list[Entry] = []
    for key, value in node.value:
        entry = _entry(path, text, key, value)
        if isinstance(value, yaml.MappingNode) and not prefix and _is_group(entry.name):
            entries += _entries(path, text, value, repeated, f"{entry.name}.")
        else:
            entries.append(dataclasses.replace(entry, name=prefix + entry.name))
    return entries


def _is_group(name: str) -> bool:
    return name in GROUPS or (name not in schema().keys and find(name) is None and is_prefix(name))


def _entry(path: Path, text: str, key: yaml.Node, value: yaml.Node) -> Entry:
    span = text[value.start_mark.index : value.end_mark.index]
    given = value.value if isinstance(value, yaml.ScalarNode) else span
    name = key.value if isinstance(key, yaml.ScalarNode) else text[key.start_mark.index : key.end_mark.index]
    return Entry(name, value, given, f"{path}:{key.start_mark.line + 1}")


def _take_parent(entries: list[Entry]) -> Entry | None:
    """Removes all base_config entries from `entries`, and returns the last one with a value."""
    parents = [entry for entry in entries if entry.name == "base_config" and entry.given]
    entries[:] = [entry for entry in entries if entry.name != "base_config"]
    return parents[-1] if parents else None


def _find(wanted: str, folder: Path, visited: Iterable[Path]) -> Path | None:
    """Returns the path of the file that the text `wanted` names; None if there is no such file.

    A relative path is searched in `folder` and, if `folder` is inside a MaxText checkout, in the checkout's configs
    folder. If no file is found, base.yml and maxtext.yml mean the packaged files. The path of base.yml in a MaxText
    checkout then means the packaged base.yml, and the path of a post-training file there means the packaged
    maxtext.yml.
    """
    if path_problem(wanted):
        return None
    path = folder / wanted
    packaged = {"base.yml": BASE_YML, "maxtext.yml": MAXTEXT_YML}.get(wanted)
    itself = packaged is not None and path.exists() and path.resolve() in [other.resolve() for other in visited]
    if path.is_file() and not itself:
        return BASE_YML if path.samefile(BASE_YML) else path
    for parent in folder.resolve().parents:
        if parent.name == "configs" and parent.parent.name.lower() == "maxtext" and (parent / wanted).is_file():
            return parent / wanted
    if post_train_name(wanted):
        return MAXTEXT_YML
    return BASE_YML if _MAXTEXT_BASE.fullmatch(wanted) else packaged


def _why_not_found(wanted: str, folder: Path) -> str:
    if problem := path_problem(wanted):
        return problem
    why = "this is a folder" if (folder / wanted).is_dir() else "there is no such file"
    return f"{why}; the packaged files are base.yml and maxtext.yml"


def _is_maxtext(entries: Sequence[Entry], schema: Schema) -> bool:
    """Returns whether a file without base_config is a version of MaxText's base.yml.

    The criterion is the number of the file's keys that our base.yml lacks: 0 in a copy of our base.yml, and 17 in the
    first version of MaxText's base.yml.
    """
    names = {entry.name for entry in entries}
    foreign = names - set(schema.keys)
    return len(foreign) >= 10 and sum(name in verdicts() for name in foreign) >= 10 and is_base(names)


def _missing(path: Path, given: set[str], schema: Schema) -> list[str]:
    lacking = [name for name in schema.keys if name not in given]
    if not lacking:
        return []
    count = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    names = ", ".join(lacking[:3]) + count
    is_preset = f", or model_name={path.stem} for the preset of that name" if path.stem in preset_names() else ""
    return [f"{path}: no base_config, and keys are missing ({names}); add the line `base_config: base.yml`{is_preset}"]

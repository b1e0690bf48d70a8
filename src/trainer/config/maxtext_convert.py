"""Converts a MaxText command to this trainer's command, with a verdict for each key.

`load` gives the same verdicts for the same words, because each key is read by the same `Reader`.
"""

import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.config import maxtext
from trainer.config.effects import no_effect_of
from trainer.config.environment import PREFIX, variables
from trainer.config.errors import UserError, shortened
from trainer.config.files import COMMAND_LINE, ENVIRONMENT, is_maxtexts_base
from trainer.config.load import Loaded, load, malformed
from trainer.config.maxtext_command import Command, has_variable
from trainer.config.reader import Reader
from trainer.config.schema import schema
from trainer.config.values import read_text

SAME, DIFFERS, UNKNOWN = "same", "differs", "unknown"
NO_EFFECT, REFUSED = "no effect", "refused"
# The order in which verdicts are shown: what needs attention comes first.
KINDS = (UNKNOWN, REFUSED, maxtext.NOT_YET, maxtext.NEVER, maxtext.RENAMED, DIFFERS, maxtext.NEEDLESS, NO_EFFECT, SAME)
TRAIN, COMPILE = "trainer.train", "trainer.train_compile"
SAME_WORDS = (TRAIN, COMPILE, "trainer.generate")  # programs that take MaxText's words, each with a verdict
# Keys whose value restricts other keys. If the value is a shell variable, it cannot be checked.
_DECIDING = ("model_name", "compile_topology", "decoder_block", "dataset_type")


class Row(NamedTuple):
    """The verdict on one key.

    Attributes:
      given: as written: KEY=VALUE or M_KEY=VALUE.
      kind: one of `KINDS`.
      text: the reason, or what differs.
      word: what to write instead; "" to leave it out.
      problem: the message with which `load` refuses the key; "" if it accepts it.
    """

    given: str
    kind: str
    text: str
    word: str
    problem: str = ""


class Program(NamedTuple):
    """How one of MaxText's programs is handled: what runs instead, or `why` nothing does."""

    runs: str
    why: str


class Conversion(NamedTuple):
    """A converted command.

    Attributes:
      words: the words of our command, after the variables of its environment.
      rows: the verdicts, in the order of the command.
      problems: problems of the whole command, not of one row.
      notes: what `trainer.train` says about the command at its start, without its verdicts.
    """

    words: list[str]
    rows: list[Row]
    problems: list[str]
    notes: list[str]

    @property
    def runs(self) -> bool:
        """Whether the configuration of the command can be loaded."""
        return not self.problems and not any(row.problem for row in self.rows)


def program(module: str) -> Program | None:
    """Returns how MaxText's program `module` is handled; None if there is no such program. "" is training."""
    last = re.split(r"[./]", module)[-1] or "train"
    if has_variable(last):  # MaxText's scripts choose between train and train_compile
        last = "train"
    for row in maxtext.table()["modules"]:
        if last in row["names"]:
            return Program(row.get("runs", ""), row.get("why", ""))
    return None


def programs() -> list[str]:
    """Returns the last part of the name of every program that has a verdict."""
    return [name for row in maxtext.table()["modules"] for name in row["names"]]


def fill(template: str, command: Command) -> tuple[list[str], list[str], list[str]]:
    """Fills the values of MaxText's keys into the command `template`.

    Returns:
      The words of the command; the keys that it lacks, whose places hold their names in capitals; the unused words.
    """
    given = {name.lstrip("-"): text for name, _, text in (word.partition("=") for word in command.words)}
    # MaxText's tools also take options whose value is the next word.
    given |= {name[2:]: text for name, text in itertools.pairwise(command.words) if re.fullmatch(r"--\w+", name)}
    names = re.findall(r"{(\w+)}", template)
    words = [
        re.sub(r"{(\w+)}", lambda found: given.get(found.group(1)) or found.group(1).upper(), word)
        for word in template.split()
    ]
    used = {given[name] for name in names if name in given}
    unused = [word for word in command.words if word not in used and word.partition("=")[0].lstrip("-") not in names]
    return words, [name for name in names if not given.get(name)], unused


def convert(command: Command, runs: str) -> Conversion:
    """Returns our command for `command`, which our program `runs` replaces."""
    environment, unknown = variables(command.environment)
    kept = [f"{name}={text}" for name, text in command.environment.items() if not name.startswith(PREFIX)]
    rows = [_verdict(name, text, f"{variable}={text}", variable) for name, (variable, text) in environment.items()]
    rows += [Row(line.partition(" in ")[0], UNKNOWN, line.partition(": ")[2], "") for line in unknown]
    rows += [_verdict(word.partition("=")[0], word.partition("=")[2], word) for word in command.words]
    yml = command.yml
    if not yml or is_maxtexts_base(yml) or (has_variable(yml) and yml.endswith("/base.yml")):
        yml = "base.yml"
    written = [(row, row.word) for row in rows if row.word]
    assigned = [word for row, word in written if _in_environment(row)]
    words = [word for row, word in written if not _in_environment(row)]
    checked = [word for word in words if _is_known(word)]
    problems: list[str] = []
    notes: list[str] = []
    loaded: Loaded | None = None
    try:
        # Under the name that was given, `load` reports how MaxText's defaults differ.
        first = command.yml if is_maxtexts_base(command.yml) else yml
        found = dict(word.partition("=")[::2] for word in assigned if _is_known(word))
        loaded = load([first, *checked], environment=found)
        if runs == COMPILE and not loaded.config.compile_topology and not unchecked(words):
            raise UserError("compile_topology is empty: give the devices to compile for, such as v5e-16 or cpu-8")
    except UserError as error:
        lines = str(error).split("\n  ")
        rows = [_refused(row, lines) for row in rows]
        own = {row.problem for row in rows}
        problems = [line for line in lines[1:] or lines if line not in own]
    if loaded is not None:
        notes = [note for note in loaded.notes if not note.startswith(("MaxText's ", command.yml or "\0"))]
        rows = [_with_effect(row, loaded) for row in rows]
    return Conversion([*kept, *assigned, "python", "-m", runs, yml, *words], rows, problems, notes)


def by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each kind, in the order of `KINDS`."""
    found = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    return {kind: those for kind, those in found.items() if those}


def _verdict(name: str, text: str, given: str, variable: str = "") -> Row:
    """Returns the verdict on the word `given`, or on the key `name` that is given as an environment variable."""
    reader, where = Reader(schema()), f"{ENVIRONMENT}{variable}" if variable else COMMAND_LINE
    shape = malformed(reader, name, "=" in given, text)
    if shape and name.lstrip("-").replace("-", "_") in schema().keys and "=" in given:
        bare = name.lstrip("-").replace("-", "_")
        return _verdict(bare, text, f"{bare}={text}")._replace(given=given, kind=maxtext.RENAMED, text="without dashes")
    if shape:
        return Row(given, UNKNOWN, shape, given, f"{shortened(given)} ({where}): {shape}")
    reader.setting(name, text, where, functools.partial(read_text, text=text))
    problem = reader.mistakes[0] if reader.mistakes else ""
    said = problem.partition(f" ({where}): ")[2]
    if name in schema().keys:
        if has_variable(text) and (problem or name in _DECIDING):
            return Row(given, SAME, "", given)
        meaning = _meaning(name, text)
        return Row(given, REFUSED if problem else DIFFERS if meaning else SAME, said or meaning, given, problem)
    verdict = maxtext.find(name)
    if verdict is None:
        return Row(given, UNKNOWN, said, given, problem)
    if verdict.kind == maxtext.RENAMED:
        new = f"{PREFIX}{verdict.to.upper()}" if variable else verdict.to
        return Row(given, maxtext.RENAMED, f"{new}: {verdict.why}", f"{new}={text}")
    if reader.accepted:
        why = verdict.why if verdict.neutral is None else "this value changes nothing here"
        return Row(given, maxtext.NEEDLESS, why, "")
    return Row(given, verdict.kind, said, given, problem)


def _meaning(name: str, text: str) -> str:
    """Returns what differs from MaxText in the key's meaning; "" if nothing differs."""
    if _is_text(name) and text.lower() in ("none", "null", "~"):
        return f"the text {text}; MaxText reads it as no value: leave the key out"
    for pattern, meaning in maxtext.table()["meanings"].items():
        if fnmatch.fnmatchcase(f"{name}={text}" if "=" in pattern else name, pattern):
            return str(meaning)
    return ""


def _refused(row: Row, problems: Sequence[str]) -> Row:
    """Returns `row` with the first problem of the whole configuration, out of `problems`, that is about its key."""
    if row.problem or not row.word:
        return row
    name = row.word.partition("=")[0]
    for line in problems:
        head, _, said = line.partition("): ")
        if head.startswith(f"{name}=") and f"({COMMAND_LINE}" in head and said:
            kind = maxtext.NOT_YET if "not supported yet" in said else REFUSED
            return row._replace(kind=kind, text=said, problem=line)
    return row


def _with_effect(row: Row, loaded: Loaded) -> Row:
    """Returns `row`, or a row that says why a key has no effect in this configuration."""
    name = row.word.partition("=")[0]
    reason = no_effect_of(loaded.config, name) if row.kind in (SAME, DIFFERS) and name in loaded.changed else None
    return row._replace(kind=NO_EFFECT, text=reason) if reason else row


def _in_environment(row: Row) -> bool:
    return row.given.startswith(PREFIX)


def _is_known(word: str) -> bool:
    name, _, text = word.partition("=")
    return not has_variable(text) or (name not in _DECIDING and _is_text(name))


def _is_text(name: str) -> bool:
    key = schema().keys.get(name)
    return key is not None and key.kind is str and not key.choices


def unchecked(words: Sequence[str]) -> list[str]:
    """Returns the settings that were not checked because their values are shell variables."""
    return [word for word in words if word.partition("=")[0] in schema().keys and not _is_known(word)]

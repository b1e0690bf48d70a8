"""The verdict on each key of a MaxText command. Keys and values are read as in `trainer.config.load`."""

import fnmatch
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.config.command import malformed
from trainer.config.environment import PREFIX
from trainer.config.errors import shortened
from trainer.config.files import COMMAND_LINE, ENVIRONMENT
from trainer.config.maxtext import verdicts
from trainer.config.reader import Reader
from trainer.config.schema import plain_name, schema
from trainer.config.values import read_text
from trainer.maxtext.shell_words import has_variable

SAME, DIFFERS, UNKNOWN = "same", "differs", "unknown"
NO_EFFECT, REFUSED = "no effect", "refused"
STOPPING = (UNKNOWN, REFUSED, verdicts.NOT_YET, verdicts.NEVER)
# The order in which verdicts are shown: those that need attention come first.
KINDS = (*STOPPING, verdicts.RENAMED, DIFFERS, verdicts.NEEDLESS, NO_EFFECT, SAME)
# Keys that restrict other keys. If such a key's value is a shell variable, the restricted keys cannot be checked.
DECIDING = ("model_name", "compile_topology", "decoder_block", "dataset_type")


class Row(NamedTuple):
    """The verdict on one key.

    Attributes:
      given: the argument or environment variable as written: KEY=VALUE or M_KEY=VALUE.
      kind: one of `KINDS`.
      text: the reason for the verdict, or how the meaning differs from MaxText's.
      word: what to write instead, in the same form; "" to leave the key out.
      problem: the message with which `load` rejects the key; "" if it accepts it.
    """

    given: str
    kind: str
    text: str
    word: str
    problem: str = ""


def by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Returns a dict from each kind that occurs in `rows` to its rows, in the order of `KINDS`."""
    grouped = {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    return {kind: those for kind, those in grouped.items() if those}


def verdict_on(name: str, text: str, given: str, variable: str = "") -> Row:
    """Returns the verdict on `given` (see `Row`). `variable`: the environment variable, if one sets the key `name`."""
    reader, where = Reader(schema()), f"{ENVIRONMENT}{variable}" if variable else COMMAND_LINE
    shape = malformed(reader, name, "=" in given, text)
    if shape and name.lstrip("-").replace("-", "_") in schema().keys and "=" in given:
        bare = name.lstrip("-").replace("-", "_")
        return verdict_on(bare, text, f"{bare}={text}")._replace(
            given=given, kind=verdicts.RENAMED, text="without dashes"
        )
    if shape:
        return Row(given, UNKNOWN, shape, given, f"{shortened(given)} ({where}): {shape}")
    ours, why = verdicts.value_here(name, text)
    if ours:
        equals = given.partition("=")[0]
        return Row(given, verdicts.RENAMED, f"{name}={ours}: {why}", f"{equals}={ours}")
    reader.setting(name, text, where, functools.partial(read_text, text=text))
    problem = reader.mistakes[0] if reader.mistakes else ""
    said = problem.partition(f" ({where}): ")[2]
    name = plain_name(name)
    if name in schema().keys:
        if has_variable(text) and (problem or name in DECIDING):
            return Row(given, SAME, "", given)
        meaning = (_meaning(variable, text) if variable else "") or _meaning(name, text)
        return Row(given, REFUSED if problem else DIFFERS if meaning else SAME, said or meaning, given, problem)
    verdict = verdicts.find(name)
    if verdict is None:
        return Row(given, UNKNOWN, said, given, problem)
    if verdict.kind == verdicts.RENAMED:
        new = f"{PREFIX}{verdict.to.upper()}" if variable else verdict.to
        return Row(given, verdicts.RENAMED, f"{new}: {verdict.why}", f"{new}={text}")
    if reader.accepted:
        why = verdict.why if verdict.neutral is None else "this value changes nothing here"
        return Row(given, verdicts.NEEDLESS, why, "")
    if has_variable(text):
        return Row(given, verdict.kind, f"not checked, as a shell replaces the value; {said}", given)
    return Row(given, verdict.kind, said, given, problem)


def _meaning(name: str, text: str) -> str:
    """Returns how the key's meaning differs from its meaning in MaxText; "" if it does not."""
    if _is_text(name) and text.lower() in ("none", "null", "~"):
        return f"the text {text}; MaxText reads it as no value: leave the key out"
    for pattern, meaning in verdicts.table()["meanings"].items():
        if fnmatch.fnmatchcase(f"{name}={text}" if "=" in pattern else name, pattern):
            return str(meaning)
    return ""


def refused(row: Row, problems: Sequence[str]) -> Row:
    """Returns `row`, with the first problem about its key, if any.

    `problems`: the problems of the whole configuration.
    """
    if row.problem or not row.word:
        return row
    name = row.word.partition("=")[0]
    for line in problems:
        head, _, said = line.partition("): ")
        if head.startswith(f"{name}=") and f"({COMMAND_LINE}" in head and said:
            kind = verdicts.NOT_YET if "not supported yet" in said else REFUSED
            return row._replace(kind=kind, text=said, problem=line)
    return row


def in_environment(row: Row) -> bool:
    """Returns whether the key was given as an environment variable."""
    return row.given.startswith(PREFIX)


def is_known(word: str) -> bool:
    """Returns whether the value in KEY=VALUE can be checked: it has no shell variable, or the key accepts any text."""
    name, _, text = word.partition("=")
    return not has_variable(text) or (name not in DECIDING and _is_text(name))


def _is_text(name: str) -> bool:
    key = schema().keys.get(name)
    return key is not None and key.kind is str and not key.choices


def unchecked(words: Sequence[str]) -> list[str]:
    """Returns the settings that were not checked because their values are shell variables."""
    return [word for word in words if "=" in word and not is_known(word)]

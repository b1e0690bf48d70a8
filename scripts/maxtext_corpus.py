"""Converts every command that a checkout of MaxText documents, and counts the verdicts and their reasons.

    python scripts/maxtext_corpus.py CHECKOUT [--maxtext VERSION] [--list VERDICT]

CHECKOUT is a checkout or an unpacked source tree of MaxText. A command is text in a page, a script or a docstring that
runs a module or a file of MaxText with python. Open quotes and trailing backslashes continue a command on the next
line. The table in docs/from-maxtext.md has dated counts; `--list` prints the commands themselves.
"""

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.config.errors import UserError
from trainer.maxtext.command_line import as_text, parse
from trainer.maxtext.convert import program
from trainer.maxtext.rows import UNKNOWN, Row
from trainer.maxtext.shell_words import Unfinished
from trainer.maxtext.shell_words import commands as commands_of
from trainer.maxtext.tools import converted
from trainer.maxtext.version import versions

ENDINGS = (".md", ".rst", ".sh", ".py", ".ipynb", ".yml", ".yaml", ".txt")
_START = re.compile(r"python3?\S* +(-m +)?[\"']?\S*maxtext[\w$/{}]*[./]", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?:export +)?[A-Za-z_]\w*=(?:'[^']*'|\"[^\"$`]*\"|[\w./:@%+,-]+)\s*(?:;|#.*)?$")
_LONGEST = 60  # maximum lines of a command
_LACKS = "the path of data, a tokenizer or parameters is not in the command"


class Outcome(NamedTuple):
    """The result of a conversion. `verdict` is "converted", "lacks a path" (if that is the only problem), "refused", or
    "no program here"."""

    verdict: str
    reasons: tuple[str, ...] = ()
    text: str = ""


def outcome(command: str, version: str = "") -> Outcome:
    """Converts one command of MaxText's `version`; if it is "", the command's keys determine the version."""
    try:
        read = parse([command])
    except UserError as error:
        return Outcome("refused", (str(error).rpartition(": ")[2],))
    found = program(read.module)
    if found is None or not found.runs:
        return Outcome("no program here", (found.why if found else "a program that is not known",))
    made = converted(read, found.runs, version)
    text = as_text(made.words)
    if made.runs:
        return Outcome("converted", (), text)
    reasons = {*(_of_key(row) for row in made.rows if row.problem), *(_of_all(line) for line in made.problems)}
    return Outcome("lacks a path" if reasons == {_LACKS} else "refused", tuple(sorted(reasons)), text)


def _of_key(row: Row) -> str:
    name = row.given.lstrip("-").partition("=")[0]
    if "remote paths" in row.text:
        return "a path in a bucket"
    if row.kind == UNKNOWN:
        return "a word that is no key: text around the command, or a variable that holds words"
    return f"{name}: {row.text.partition(';')[0]}" if name == "model_name" else f"{name}: {row.kind}"


def _of_all(line: str) -> str:
    if "does not contain" in line:
        return _LACKS
    if ".yml" in line:
        return "another yml than base.yml"
    return (
        "a local folder as OUT" if "writes to a local folder" in line else re.sub(r"=\S+", "", line.partition(" (")[0])
    )


def commands(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the file and the text of each documented command; equal texts in a file are yielded once. A text begins
    with the file's preceding plain assignments to variables that the command uses."""
    for path in sorted(root.rglob("*")):
        if path.suffix not in ENDINGS or not path.is_file() or ".git" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".ipynb":
            text = "\n".join(_cells(text))
        yield from ((path.relative_to(root), command) for command in dict.fromkeys(_commands(text)))


def _cells(text: str) -> Iterator[str]:
    try:
        for cell in json.loads(text)["cells"]:
            yield "".join(cell["source"])
    except (ValueError, KeyError, TypeError):
        return


def _commands(text: str) -> Iterator[str]:
    lines = [re.sub(r"^\s*(#+|>|!)", " ", line).rstrip() for line in text.splitlines()]
    lines = [re.sub(r"<[A-Za-z][^<>]*>", "$PLACEHOLDER", line) for line in lines]
    at = 0
    assigned: dict[str, str] = {}
    while at < len(lines):
        begin, at = at, at + 1
        found = _START.search(lines[begin])
        if not found:
            if _ASSIGNED.match(lines[begin].strip()):
                word = lines[begin].strip().removeprefix("export ").partition("#")[0].strip(" ;")
                assigned[word.partition("=")[0]] = word
            continue
        line = lines[begin]
        if "`" in line[: found.start()] and "`" in line[found.start() :] and "$(" not in line:
            line = line[: line.index("`", found.start())].rpartition("`")[2]  # code within a sentence
        while at < len(lines) and at - begin < _LONGEST and (line.endswith("\\") or not _complete(line)):
            line, at = f"{line}\n{lines[at]}", at + 1
        if _complete(line):
            used = [word for name, word in assigned.items() if re.search(rf"\${{?{name}\b", line)]
            yield "\n".join([*(f"{word};" for word in used), line])


def _complete(line: str) -> bool:
    try:
        list(commands_of(line))
    except UserError as error:
        return not isinstance(error, Unfinished)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--maxtext", default="", choices=versions(), help="the version of MaxText")
    parser.add_argument("--list", default="", metavar="VERDICT", help="print the commands of one verdict")
    options = parser.parse_args()
    found = list(commands(options.checkout))
    made = [outcome(command, options.maxtext) for _, command in found]
    for (path, command), it in zip(found, made, strict=True):
        if it.verdict == options.list:
            print(f"{path}: {command}\n  -> {it.text}  {'; '.join(it.reasons)}\n")
    print(f"{len(found)} commands in {len({path for path, _ in found})} files")
    for verdict, count in collections.Counter(it.verdict for it in made).most_common():
        print(f"| {verdict} | {count} |")
    reasons = collections.Counter(reason for it in made for reason in it.reasons)
    alone = collections.Counter(it.reasons[0] for it in made if len(it.reasons) == 1)
    print("\n| reason | commands | and no other reason |\n|---|---|---|")
    for reason, count in reasons.most_common():
        print(f"| {reason} | {count} | {alone[reason]} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

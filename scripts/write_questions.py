"""Writes questions about Python's standard library with their answers, as JSON lines for docs/guides/sft.md, and
pairs of answers for docs/guides/preferences.md.

    python scripts/write_questions.py FILE [PAIRS]

A line of FILE is {"prompt": "What is OrderedDict?", "completion": "OrderedDict is a class of collections."}. There is
a line for each public top-level function or class whose name is defined once in the library; a hash determines the
order. The source is parsed, not imported. A line of PAIRS is
{"prompt": ..., "chosen": ..., "rejected": ...}: the rejected answer calls a class a function, or the reverse.
"""

import ast
import hashlib
import json
import sys
import warnings
from pathlib import Path

from trainer.data.stdlib import stdlib_folder

KINDS: dict[type, str] = {ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "coroutine"}


def questions(folder: Path) -> list[dict[str, str]]:
    """Returns a question and its answer for each public name that is defined once in the standard library."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder).with_suffix("")
        if any(
            part.startswith("_") or part in ("site-packages", "test", "tests", "idle_test") for part in module.parts
        ):
            continue
        with warnings.catch_warnings():  # invalid escapes in strings cause warnings
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(path.read_bytes())
            except SyntaxError:  # a template for Python 2
                continue
        for node in tree.body:
            name = getattr(node, "name", "_")
            if (kind := KINDS.get(type(node))) and not name.startswith("_"):
                found.setdefault(name, []).append(f"{name} is a {kind} of {'.'.join(module.parts)}.")
    once = [(name, answers[0]) for name, answers in found.items() if len(answers) == 1]
    once.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    return [{"prompt": f"What is {name}?", "completion": answer} for name, answer in once]


def pair(line: dict[str, str]) -> dict[str, str]:
    """Returns a question with its answer, and with an answer that calls a class a function, or the reverse."""
    right = line["completion"]
    wrong = right.replace(" is a class of ", " is a function of ")
    if wrong == right:
        wrong = right.replace(" is a function of ", " is a class of ").replace(" is a coroutine of ", " is a class of ")
    return {"prompt": line["prompt"], "chosen": right, "rejected": wrong}


def write(file: str, lines: list[dict[str, str]], what: str) -> None:
    """Writes `lines` as JSON lines, and prints their number."""
    Path(file).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines):,} {what} in {file}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    found = questions(stdlib_folder())
    write(sys.argv[1], found, "questions")
    if len(sys.argv) == 3:
        write(sys.argv[2], [pair(line) for line in found], "pairs")

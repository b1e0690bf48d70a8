"""Writes questions on Python's standard library and their answers, as JSON lines for docs/guides/sft.md.

    python scripts/write_questions.py FILE

A line is {"prompt": "What is OrderedDict?", "completion": "OrderedDict is a class of collections."}, for each public
function and class at the top of a module, in an order that a hash gives. Nothing is imported: the source is parsed.
"""

import ast
import hashlib
import json
import sys
import warnings
from pathlib import Path

from trainer.data.stdlib import stdlib_folder

KINDS = {ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "coroutine"}


def questions(folder: Path) -> list[dict[str, str]]:
    """Returns a question and its answer for each public name that is defined once in the standard library."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder).with_suffix("")
        if any(
            part.startswith("_") or part in ("site-packages", "test", "tests", "idle_test") for part in module.parts
        ):
            continue
        with warnings.catch_warnings():  # of an old escape in someone's string
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(path.read_bytes())
            except SyntaxError:  # a template for Python 2
                continue
        for node in tree.body:
            if (kind := KINDS.get(type(node))) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{node.name} is a {kind} of {'.'.join(module.parts)}.")
    once = [(name, answers[0]) for name, answers in found.items() if len(answers) == 1]
    once.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    return [{"prompt": f"What is {name}?", "completion": answer} for name, answer in once]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    lines = questions(stdlib_folder())
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines):,} questions in {sys.argv[1]}")

"""The commands in README.md, CONTRIBUTING.md and the docs, for scripts/run_docs.py and the tests."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A fenced block with its language, and the comment directly before it.
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL
)
HEREDOC = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END\n", re.MULTILINE | re.DOTALL)
_SYNOPSIS = re.compile(r"\[key=value|\[SECTION\]|FROM OUT|RUN \[RUN")
_PYTHON = re.compile(r"\S*\bpython3?")
_NOT_OURS = ("pip", "pytest", "venv")


class Command(NamedTuple):
    """A documented command of the project.

    Attributes:
      page: the path of its page, relative to the checkout.
      variables: environment variables that the command sets.
      program: a module, or the path of a script.
      words: the arguments.
      code: the expected exit code: 0, or N if the comment directly before the block is `exit code: N`.
      named: NAME if the comment directly before the block is `command: NAME`, else "". Named commands are run by
        .ci/run itself.
    """

    page: str
    variables: dict[str, str]
    program: str
    words: list[str]
    code: int = 0
    named: str = ""


def commands() -> Iterator[Command]:
    """Yields the commands in all fenced blocks whose language is missing or bash, except for synopses."""
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if block["language"] not in ("", "bash"):
                continue
            kind, _, value = (block["comment"] or "").partition(": ")
            for line in HEREDOC.sub("", block["text"]).replace("\\\n", " ").splitlines():
                if _SYNOPSIS.search(line):
                    continue
                for part in line.split("&&"):
                    if found := _command(page, part):
                        code = int(value) if kind == "exit code" else 0
                        yield found._replace(code=code, named=value if kind == "command" else "")


def _command(page: Path, line: str) -> Command | None:
    """Returns the command of a line; None if it runs no program of this project."""
    words = shlex.split(line, comments=True) if _PYTHON.search(line) else []
    at = next((i for i, word in enumerate(words) if _PYTHON.fullmatch(word)), None)
    if at is None:
        return None
    program, *rest = words[at + 1 :] if words[at + 1] != "-m" else words[at + 2 :]
    if program in _NOT_OURS:
        return None
    variables = dict(word.split("=", 1) for word in words[:at] if re.match(r"[A-Z_]+=", word))
    return Command(str(page.relative_to(ROOT)), variables, program, rest[: rest.index(">")] if ">" in rest else rest)

"""`python -m trainer.from_maxtext '<a MaxText command line>'`: converts the command to this trainer.

Prints the converted command, and a verdict for each of its keys.
"""

import sys
import textwrap
from collections.abc import Sequence

from trainer.config.errors import UserError, command_line, exit_on_user_error, nearest, shortened
from trainer.config.words import counted
from trainer.maxtext.command_line import as_text, parse
from trainer.maxtext.convert import Conversion, program, programs
from trainer.maxtext.rows import Row, by_kind, unchecked
from trainer.maxtext.tools import converted
from trainer.maxtext.version import versions

HELP = """\
usage: python -m trainer.from_maxtext [--maxtext=VERSION] 'python3 -m maxtext...train base.yml key=value ...'

Prints the command of this trainer for a MaxText command, and a verdict for each of its keys:
  same       the key has the same meaning here
  differs    the key exists here, but its meaning differs as described
  no effect  the key is accepted, but has no effect under the other settings
  needless   the key is left out of the printed command, for the reason given
  renamed    the key has another name here, which is given
  refused, not yet, never, unknown   the command cannot run with this key; the text describes what to do instead
The text is parsed as in bash, with quotes, line continuations, and the variables and arrays set before the command;
unsupported syntax is refused by name. M_KEY=value sets a key, too. The quotes around the command may be omitted.
VERSION is 0.2.5, or 0.2.4 for this and earlier versions; by default it is detected from keys that only one version has.
0.2.5 has NNX models only, no flags to select Linen, and the default dataset_type=synthetic instead of tfds. Values such
as $STEPS are unknown here and not checked.

Exit code: 0 if the printed command is valid and means the same as MaxText's, apart from the differences that are
printed, 2 if not."""
_WIDTH = 150
_KIND, _GIVEN = 9, 48  # widths of columns


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if words in (["--help"], ["-h"], ["help"]):
        print(HELP)
        return
    version, words = _version(words)
    command = parse(words)
    replacement = program(command.module)
    if replacement is None:
        last = command.module.rpartition(".")[2]
        raise UserError(
            f"{shortened(command.module)} is not a known program of MaxText{nearest(last, programs())}; "
            "trainer.train, train_compile, generate, export, parity and shardings are the programs here"
        )
    if not replacement.runs:
        raise UserError(f"{command.module}: {replacement.why}")
    _print(converted(command, replacement.runs, version))


def _version(words: list[str]) -> tuple[str, list[str]]:
    """Returns the MaxText version if the first argument is --maxtext=VERSION, else "", and the other arguments."""
    option, _, version = words[0].partition("=") if words else ("", "", "")
    if option != "--maxtext":
        return "", words
    if version not in versions():
        raise UserError(f"{shortened(words[0])}: the versions are {' and '.join(versions())}")
    return version, words[1:]


def _print(made: Conversion) -> None:
    print(as_text(made.words))
    if made.version:
        print(f"\n{textwrap.fill(made.version, _WIDTH, break_on_hyphens=False)}")
    wide = max((len(row.given) for row in made.rows if row.text and len(row.given) <= _GIVEN), default=0)
    for kind, rows in by_kind(made.rows).items():
        print()
        for line in _table(kind, rows, wide):
            print(line)
    if made.notes:
        print("\nnotes that the command prints when it starts:")
        for note in made.notes:
            print(textwrap.fill(note, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    if variables := unchecked(made.words):
        print(f"\nnot checked, as a shell replaces the value: {', '.join(map(shortened, variables))}")
    if not made.runs:
        sys.stdout.flush()
        stopping = [row for row in made.rows if row.problem]
        raise UserError(_stopped(stopping, made.problems))


def _table(kind: str, rows: Sequence[Row], wide: int) -> list[str]:
    """Returns the lines for the rows with the verdict `kind`. Rows without a text form one comma-separated list.
    `wide`: the width of the column of keys."""
    bare = ", ".join(shortened(row.given) for row in rows if not row.text)
    indent = " " * (_KIND + 2)
    lines = textwrap.wrap(bare, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    for row in rows:
        if not row.text:
            continue
        given = shortened(row.given)
        texts = textwrap.wrap(row.text, _WIDTH - len(indent) - wide - 2, break_on_hyphens=False)
        if len(given) > wide:
            lines.append(given)
            given = ""
        lines += [f"{given if i == 0 else '':<{wide}}  {text}" for i, text in enumerate(texts)]
    return [f"{kind if i == 0 else '':<{_KIND}}  {line}" for i, line in enumerate(lines)]


def _stopped(rows: Sequence[Row], problems: Sequence[str]) -> str:
    lines = [f"{', '.join(shortened(row.given) for row in rows)}: see above"] if rows else []
    wrapped = [
        textwrap.fill(line, _WIDTH, subsequent_indent="    ", break_on_hyphens=False) for line in (*lines, *problems)
    ]
    count = counted(len(rows) + len(problems), "mistake")
    return "\n  ".join([f"{count} to fix before the printed command can run:", *wrapped])


if __name__ == "__main__":
    main()

"""Parses a MaxText command, as pasted from a shell or a script. As in bash's manual, a command consists of words."""

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.environment import PREFIX
from trainer.config.errors import UserError
from trainer.config.files import YML_ENDINGS
from trainer.maxtext.shell import Shell
from trainer.maxtext.shell_words import Word, commands, end_of_expansion, has_variable, unquoted

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
# A command that is quoted in another command, as in `xpk workload create --command "python3 -m maxtext..."`, or that is
# assigned to a variable, as in CMD="python3 ...".
_INNER = re.compile(r"python\S* +(-m )?\S*maxtext", re.IGNORECASE)
_INNER_NAME = re.compile(r"-*[A-Za-z_][\w-]*=(?=(?:\w+=\S+ +)*(?:\S*python|export |cd |set |source ))")
_WIDTH = 116


class Command(NamedTuple):
    """The parts of a command.

    Attributes:
      module: the module as written, such as `maxtext.trainers.pre_train.train`; "" if the command contains none.
      environment: the variables that are exported or set before the command, except variables that are expanded in
        the command's words.
      yml: the first word after the module (of the command, if there is no module) if it names a yml file; otherwise "".
      words: the other words, usually key=value.
    """

    module: str
    environment: dict[str, str]
    yml: str
    words: list[str]


def parse(arguments: Sequence[str]) -> Command:
    """Returns the command in `arguments`. A single argument is shell text; several arguments are the command's words.

    Raises:
      UserError: there is no command, its quotes do not match, or a part of it cannot be read as bash reads it.
    """
    reader = _Reader()
    reader.read(arguments[0] if len(arguments) == 1 else " ".join(map(_in_quotes, arguments)))
    return reader.command()


class _Reader:
    """Reads commands up to the first one that runs a module of MaxText."""

    def __init__(self) -> None:
        self._shell = Shell()
        self._module = ""
        self._given: dict[str, str] = {}  # assignments before the module
        self._words: list[str] = []  # words after the module; without a module, all words of the last command
        self._refused: UserError | None = None
        self._done = False

    def read(self, text: str) -> None:
        self._done = self._shell.run(text, self._run)

    def command(self) -> Command:
        """Returns the parsed command.

        Raises:
          UserError: there is no command, or it contains a value that is unknown.
        """
        shell = self._shell
        values = {name: value[0] for name, value in shell.values.items() if isinstance(value, list) and value}
        inner = next((text for text in values.values() if _INNER.search(text)), "")
        if inner and not self._done and not self._module:  # the text only assigns CMD="python3 ..."
            self.read(unquoted(inner, as_code=True))
        if self._refused and not self._done:
            raise self._refused
        if not self._words and not self._module:  # the text contains only assignments
            self._given = {name: text for name, text in values.items() if _of_environment(name)}
            self._words = [f"{name}={text}" for name, text in values.items() if name not in self._given]
            shell.exported = set(values)
        if not self._words and not self._module and not self._given:
            example = "python -m trainer.from_maxtext 'python3 -m maxtext... key=value ...'"
            raise UserError(f"give a MaxText command: {example}")
        left = [name for name in shell.values if name not in shell.used | self._given.keys()]
        hidden = next((name for name in left if name.startswith(PREFIX) and name not in shell.exported), "")
        if hidden:
            raise UserError(f"{hidden} is not exported, so MaxText does not see it; write export {hidden}=...")
        given = {name: "".join(shell.known(name)[:1]) for name in left if name in shell.exported} | self._given
        environment = {name: unquoted(text) for name, text in given.items()}
        # If pasting replaced a line break after a backslash by a space, the next word begins with that space.
        words = [unquoted(word).lstrip() for word in self._words if word.strip()]
        has_yml = bool(words) and words[0].endswith(YML_ENDINGS) and "=" not in words[0]
        return Command(self._module, environment, words[0] if has_yml else "", words[1:] if has_yml else words)

    def _run(self, assignments: Sequence[Word], words: Sequence[Word]) -> bool:
        """Reads one command, and returns whether it runs a module of MaxText."""
        shell, used, values = self._shell, set(self._shell.used), dict(self._shell.values)
        try:
            given = {name: "".join(shell.known(name)[:1]) for name in map(shell.assign, assignments)}
            late = {
                name: f"${name}: a shell expands a command's words before it applies {name}=...; put ; between them"
                for name in given
            }
            assigned, shell.values = shell.values, {**late, **values}
            fields = [field for word in words for field in shell.fields(word)]
        except UserError as error:
            if any("maxtext" in word.source.lower() for word in words):
                raise
            self._refused = self._refused or error
            shell.values, shell.used = values, used
            return False
        before, module, rest = _at_module(fields)
        at = next((i for i, field in enumerate(fields) if _INNER.search(field) and _has_words(field)), None)
        if fields[:1] == ["eval"] or (at is not None and "maxtext" not in module.lower()):
            shell.values = assigned
            shell.exported |= given.keys()
            inner = " ".join(fields[1:]) if fields[0] == "eval" else fields[at or 0]
            name = _INNER_NAME.match(inner)
            return shell.run(unquoted(inner[name.end() if name else 0 :], as_code=True), self._run)
        shell.values = values
        done = "maxtext" in module.lower()
        if done or not self._module:  # an earlier command may be `python3 -m pip install ...`
            keys = {} if module else {name: text for name, text in given.items() if not _of_environment(name)}
            self._given = {name: text for name, text in given.items() if name not in keys}
            self._given |= dict(word.partition("=")[::2] for word in before)
            self._module, self._words = module, [*(f"{name}={text}" for name, text in keys.items()), *rest]
        else:
            shell.used = used
        return done


def as_text(words: Sequence[str]) -> str:
    """Returns `words` in shell syntax, on one line or, if that is too long, on several lines."""
    lines = [""]
    for word in map(_quoted, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _at_module(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Returns the assignments before a command, the command's module, and the words after the module."""
    for i, word in enumerate(words):
        script = word.endswith(".py") and "=" not in word
        if (word == "-m" and i + 1 < len(words)) or script:
            module = word.removesuffix(".py").replace("/", ".").lstrip(".") if script else words[i + 1]
            before = [word for word in words[:i] if _ASSIGNMENT.match(word)]
            return before, module, list(words[i + (1 if script else 2) :])
    return [], "", list(words)


def _has_words(text: str) -> bool:
    """Returns whether a shell splits `text` into several words. `$(python3 -m maxtext...)` is one word."""
    return len(next(commands(unquoted(text, as_code=True)))[0]) > 1


def _of_environment(name: str) -> bool:
    return name.startswith(PREFIX) or name.isupper()


def _quoted(word: str) -> str:
    if not has_variable(word):
        return shlex.quote(word)
    if re.fullmatch(r"(?:[\w@%+=:,./-]|\$\w+|\$\{\w+\})+", word):
        return word
    return _in_quotes(word)


def _in_quotes(word: str) -> str:
    """Returns `word` in double quotes, in which a shell still expands variables and commands."""
    name = _ASSIGNMENT.match(word)
    at = name.end() if name and name.group().isupper() else 0
    text = word[:at] + '"'
    while at < len(word):
        end = max(end_of_expansion(word, at) if word[at] in "$`" else at, at + 1)
        text += word[at:end] if end > at + 1 else re.sub(r'["\\]', r"\\\g<0>", word[at])
        at = end
    return text + '"'

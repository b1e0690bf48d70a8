"""Parses a MaxText command, as pasted from a shell or a script."""

import ast
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config.environment import PREFIX
from trainer.config.errors import UserError, shortened
from trainer.config.files import YML_ENDINGS

_OPERATORS = ";|&"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_REDIRECTION = re.compile(r"[0-9&]*[<>]")
_SUBSTITUTION = re.compile(r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^{}]*\}")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\)){1,200})\)\)")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_ROUNDED = {ast.Div: operator.floordiv, ast.Mod: operator.mod}  # of negative numbers they differ from a shell's
# A quoted command within another, as in `xpk workload create --command "python3 -m maxtext..."`, or CMD="python3 ...".
_INNER = re.compile(r"python\S* +(-m )?\S*maxtext", re.IGNORECASE)
_INNER_NAME = re.compile(r"-*([A-Za-z_][\w-]*)=(?=(?:\w+=\S+ +)*(?:\S*python|export |cd |set |source ))")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\??\})")
_HELD = re.compile("\0([0-9]+)\0")
_WIDTH = 116


class Command(NamedTuple):
    """The parts of a command.

    Attributes:
      module: as written, such as `maxtext.trainers.pre_train.train`; "" if the command names none.
      environment: the assignments before the command, including `export`, that none of its words uses.
      yml: the file that the first word names; "" if there is none.
      words: the other words, usually key=value.
    """

    module: str
    environment: dict[str, str]
    yml: str
    words: list[str]


def parse(arguments: Sequence[str]) -> Command:
    """Returns the command in `arguments`. A single argument is text that a shell would read; several are its words.

    Raises:
      UserError: there is no command, or its quotes do not match.
    """
    return _parsed(_shell_words(arguments[0]) if len(arguments) == 1 else list(arguments), {})


def _parsed(words: Sequence[str], environment: dict[str, str]) -> Command:
    parts = _parts(words)
    if not any(parts):
        raise UserError("give a MaxText command: python -m trainer.from_maxtext 'python3 -m maxtext... key=value ...'")
    inner: list[str] = []
    commands: dict[str, list[str]] = {}  # a variable's value, if that is a command
    while parts:
        part = [word for given in parts.pop(0) for word in commands.get(_variable(given), [given])]
        begin, module, rest = _at_module(part)
        at = next((i for i, word in enumerate(part) if " " in word and _INNER.search(word)), None)
        name = _INNER_NAME.match(part[at]) if at is not None else None
        quoted = _shell_words(part[at][name.end() if name else 0 :]) if at is not None else []
        # `$(python3 -m maxtext...)` is one word, quoted or not.
        if at is not None and len(quoted) > 1 and "maxtext" not in module.lower():
            inner = quoted
            if name is None or part[at].startswith("-"):
                break
            commands[name.group(1)] = inner
            begin = _assignments(part[:at])
            parts = [rest for rest in (part[at + 1 :], *parts) if rest]
        elif module:
            inner = []
        environment |= dict(word.partition("=")[::2] for word in begin)
        # Such as `python3 -m pip install ... && python3 -m maxtext...`.
        later = "maxtext" not in module.lower() and any(_INNER.search(" ".join(part)) for part in parts)
        if module and not inner and not later:
            break
    if inner:
        return _parsed(inner, environment)
    environment, rest = _expanded(environment, rest)
    has_yml = bool(rest) and rest[0].endswith(YML_ENDINGS) and "=" not in rest[0]
    return Command(module, environment, rest[0] if has_yml else "", rest[1:] if has_yml else rest)


def _variable(word: str) -> str:
    match = _VARIABLE.fullmatch(word)
    return (match.group(1) or match.group(2)) if match else ""


def as_text(words: Sequence[str]) -> str:
    """Returns `words` as a shell reads them, on one line or, if that is long, on several lines."""
    lines = [""]
    for word in map(_quoted, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def has_variable(text: str) -> bool:
    """Returns whether a shell would replace a part of `text`, so that its value is not known here."""
    return bool(re.search(r"\$[A-Za-z_{(]|`", text))


def _shell_words(text: str) -> list[str]:
    # Substitutions may contain spaces, quotes and operators. They are taken out while the words are split.
    held: list[str] = []

    def hold(match: re.Match[str]) -> str:
        held.append(match.group())
        return f"\0{len(held) - 1}\0"

    text = re.sub(r"(?m)^\s*#.*$|(?<=\s)#[^'\"\n]*$", "", text)
    text = re.sub(r"\\[ \t]*\r?\n", "", text)
    while (shorter := _SUBSTITUTION.sub(hold, text)) != text:
        text = shorter
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise UserError(f"{shortened(text)}: not a command of a shell: {str(error).lower()}") from error
    for i in range(len(words)):
        while match := _HELD.search(words[i]):
            words[i] = words[i].replace(match.group(), held[int(match.group(1))])
    # A line break that was pasted as a backslash and a space leaves white space in front of the next word.
    return [word.lstrip() for word in words if word.strip()]


def _parts(words: Sequence[str]) -> list[list[str]]:
    """Returns the commands between operators, without redirections and shell prompts."""
    parts: list[list[str]] = [[]]
    skip = False
    for word in words:
        if word.strip(_OPERATORS) == "":
            parts.append([])
        elif skip:
            skip = False
        elif _REDIRECTION.match(word):
            skip = _REDIRECTION.fullmatch(word.removesuffix(">")) is not None or word.endswith((">", "<"))
        elif parts[-1] or word not in ("$", "!", "%"):
            parts[-1].append(word)
    return [part for part in parts if part]


def _at_module(part: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Returns the assignments before a command, its module, and the words after the module."""
    for i, word in enumerate(part):
        script = word.endswith(".py") and "=" not in word
        if (word == "-m" and i + 1 < len(part)) or script:
            module = word.removesuffix(".py").replace("/", ".").lstrip(".") if script else part[i + 1]
            return _assignments(part[:i]), module, list(part[i + (1 if script else 2) :])
    if part[0] == "export":
        return _assignments(part), "", []
    begin = 0
    while begin < len(part) and _ASSIGNMENT.match(part[begin]) and _of_environment(part[begin]):
        begin += 1
    return list(part[:begin]), "", list(part[begin:])


def _of_environment(word: str) -> bool:
    name = word.partition("=")[0]
    return name.startswith(PREFIX) or name.isupper()


def _expanded(environment: dict[str, str], words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns `words` with assigned variables replaced by their values, and the other variables."""
    used: set[str] = set()

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in environment:
            return match.group()
        used.add(name)
        return environment[name]

    words = [
        _ARITHMETIC.sub(_computed, _in_arithmetic(_VARIABLE.sub(value, word), environment, used)) for word in words
    ]
    return {name: text for name, text in environment.items() if name not in used}, words


def _in_arithmetic(word: str, environment: Mapping[str, str], used: set[str]) -> str:
    """Returns `word` with the values of names within `$((...))`, which need no dollar sign there."""

    def value(match: re.Match[str]) -> str:
        used.update({match.group()} & environment.keys())
        return environment.get(match.group(), match.group())

    return _ARITHMETIC.sub(lambda match: re.sub(r"[A-Za-z_]\w*", value, match.group()), word)


def _computed(match: re.Match[str]) -> str:
    """Returns the value of `$((...))`, or the text if only a shell knows it."""
    try:
        return str(_number(ast.parse(match.group(1).strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return match.group()


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _number(left), _number(right)
            if type(op) in _OPERATIONS or (type(op) in _ROUNDED and min(a, b) >= 0):
                return int((_OPERATIONS | _ROUNDED)[type(op)](a, b))
    raise ValueError("a shell's arithmetic")


def _assignments(words: Sequence[str]) -> list[str]:
    return [word for word in words if _ASSIGNMENT.match(word)]


def _quoted(word: str) -> str:
    if not has_variable(word):
        return shlex.quote(word)
    if re.fullmatch(r"(?:[\w@%+=:,./-]|\$\w+|\$\{\w+\})+", word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'

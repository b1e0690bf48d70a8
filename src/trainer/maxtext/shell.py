"""Expands variables, arrays and arithmetic in the words of commands as bash does.

Parts that only a running shell can expand remain unchanged. Parts that would be misread raise a UserError.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Sequence

from trainer.config.errors import UserError, shortened
from trainer.maxtext.shell_words import ASSIGNED, Piece, Word, commands, split_at_blanks

_NAME = re.compile(r"[A-Za-z_]\w*")
_VARIABLE = re.compile(r"\$(?:(\w+|[@*#?!$-])|\{(\w+)(?:\[([@*]|\d+)\])?(?:(:?[-?])(.*))?\})", re.DOTALL)
_SIMPLE = re.compile(r"[\w./:,@%+=-]*")
_ARITHMETIC = re.compile(r"\$\(\((.{1,200})\)\)", re.DOTALL)
_BRACES = re.compile(r"\{.*(?:,|\.\.).*\}", re.DOTALL)
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[")
_OPENING = {"if": "fi", "for": "done", "select": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
# Words that may precede a command: keywords, and a shell's prompt.
_BEFORE = {*_OPENING, *_OPENING.values(), "then", "do", "else", "elif", "!", "time", "function", "$", "%"}
_DECLARING = {"export", "declare", "typeset", "local", "readonly"}
_SETTING = {"unset", "read", "mapfile", "readarray", "printf", "getopts", "let"}
_NOT_CERTAIN = "is set under a condition, in a loop, a function or another shell, or by a command; write its value"
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_ROUNDED = {ast.Div: operator.floordiv, ast.Mod: operator.mod}  # a shell rounds negative results differently


def _check_next_line(ends: str, words: Sequence[Word]) -> None:
    """Refuses NAME=VALUE on the line after a command, because a shell reads it as a separate command."""
    if ends == "\n" and words and all(ASSIGNED.match(word.bare) for word in words):
        raise UserError(f"{shortened(words[0].source)}: the previous line must end with a backslash")


class Shell:
    """The variables of a shell.

    Attributes:
      values: each variable's array (a scalar is an array of one element), or the error to report if
        its value is unknown.
      exported: the names of exported variables.
      used: the names of variables that were expanded in the words of commands.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[str] | str] = {}
        self.exported: set[str] = set()
        self.used: set[str] = set()

    def run(self, text: str, command: Callable[[Sequence[Word], Sequence[Word]], bool]) -> bool:
        """Sets the variables that `text` assigns, and calls `command` for each other command until a call returns True.

        `command` receives the assignments before the command, and the command's words. Returns whether one of its calls
        returned True.

        Raises:
          UserError: see `commands`.
        """
        blocks: list[str] = []  # the keyword or bracket that closes each open block
        before, risky = "", False
        pending: set[str] = set()  # variables that are set only if an earlier command succeeds
        for given, ends in (read := commands(text)):
            if not given and ends == "\n":
                continue
            words = self._inside(given, blocks)
            assigned = self._set(words)
            if assigned is None and words:
                count = next((i for i, word in enumerate(words) if not ASSIGNED.match(word.bare)), 0)
                if command(words[:count], words[count:]):
                    _check_next_line(ends, next(read, ([], ""))[0])
                    return True
            if blocks or before in ("||", "|") or ends in ("|", "&"):
                self._forget(assigned or ())
            elif before == "&&" and risky:
                pending |= assigned or set()
            risky = (risky and before in ("&&", "||")) or assigned is None
            before = ends
            if ends != "&&":
                self._forget(pending)
                pending = set()
            if ends == "(":
                blocks.append(")")
            elif ends == ")" and blocks[-1:] == [")"]:
                blocks.pop()
        return False

    def _inside(self, words: list[Word], blocks: list[str]) -> list[Word]:
        """Returns `words` without leading keywords of conditions and loops. Updates `blocks` for the blocks that these
        keywords open and close."""
        while words and (word := words[0].bare) in _BEFORE:
            words = words[1:]
            if word in _OPENING:
                blocks.append(_OPENING[word])
            elif word == (blocks or [""])[-1]:
                blocks.pop()
            if word in ("for", "select", "case", "function"):
                self._forget({it.bare for it in words[:1] if word in ("for", "select")})
                return []
        return words

    def _set(self, words: Sequence[Word]) -> set[str] | None:
        """Returns the names of the variables that a command sets; None if it is not a command for setting variables."""
        if all(ASSIGNED.match(word.bare) for word in words):
            return {self.assign(word) for word in words}
        name, rest = words[0].bare, words[1:]
        if element := _ELEMENT.match(name):
            self.values[element[1]] = f"${element[1]}: one of its elements is set separately; write the whole value"
            return set()
        if name not in _DECLARING | _SETTING:
            return None
        named = {word.bare for word in rest if _NAME.fullmatch(word.bare)}
        if name == "unset":
            self.values |= {it: [] for it in named}
            self.exported -= named
        elif name in _SETTING:
            self._forget(named)
        else:
            named |= (given := {self.assign(word) for word in rest if ASSIGNED.match(word.bare)})
            self.exported |= named if name == "export" or any(word.bare == "-x" for word in rest) else set()
            return given
        return named

    def _forget(self, names: Iterable[str]) -> None:
        self.values |= {name: f"${name} {_NOT_CERTAIN}" for name in names}

    def assign(self, word: Word) -> str:
        """Assigns NAME=TEXT, NAME+=TEXT, NAME=(WORDS) or NAME+=(WORDS), and returns the name."""
        found = ASSIGNED.match(word.bare)
        assert found
        name, more = found.groups()
        if name == "IFS":
            raise UserError("IFS: setting the word separator is not supported; write the words themselves")
        used = set(self.used)
        try:
            old = self.known(name) if more and name in self.values else []
            if word.items is not None:
                self.values[name] = old + [field for item in word.items for field in self.fields(item)]
            else:
                text = Word([Piece(word.bare[found.end() :], quoted=True), *word.pieces[1:]])
                (new,) = self.fields(text, split=False)
                self.values[name] = ["".join(old[:1]) + new, *old[1:]]
        except UserError as error:
            self.values[name] = str(error)
        self.used = used
        return name

    def known(self, name: str) -> list[str]:
        """Returns the value of a variable.

        Raises:
          UserError: the value is unknown.
        """
        value = self.values[name]
        if isinstance(value, str):
            raise UserError(value)
        return value

    def fields(self, word: Word, split: bool = True) -> list[str]:
        """Returns the words into which a shell expands `word`; with `split=False`, a single word.

        Raises:
          UserError: the expansion is unknown or not supported.
        """
        shape = "".join("x" if piece.quoted or piece.expands else piece.text for piece in word.pieces)
        if split and _BRACES.search(shape):
            raise UserError(
                f"{shortened(word.source)}: a shell expands it to several words; quote it, or write the words"
            )
        done: list[str] = []
        current: str | None = None
        for piece in word.pieces:
            whole = piece.quoted or not split
            values, known = self._expanded(piece) if piece.expands else ([piece.text], False)
            values = values if split else [" ".join(values)]
            for i, value in enumerate(values):
                bits = [value] if whole or not known else split_at_blanks(value)
                for j, bit in enumerate(bits):
                    if (i or j) and current is not None:
                        done.append(current)
                        current = None
                    if bit or whole:
                        current = (current or "") + bit
                    replaced = not whole and (known or not piece.expands)
                    if replaced and re.search("[*?]", bit) and "=" not in (current or ""):
                        raise UserError(f"{shortened(bit)}: only a shell can list these files; write their names")
        return done if current is None else [*done, current]

    def _expanded(self, piece: Piece) -> tuple[list[str], bool]:
        """Returns the expansion of a piece, and whether it is known; if not, the first result is the piece's text."""
        if found := _ARITHMETIC.fullmatch(piece.text):
            return self._computed(found)
        found = _VARIABLE.fullmatch(piece.text)
        name = (found.group(1) or found.group(2)) if found else ""
        if not found or name not in self.values:
            known = [it for it in _NAME.findall(piece.text[1:]) if it in self.values]
            if known and (not found or found.group(5)):
                raise UserError(
                    f"{shortened(piece.text)}: this expansion of {known[0]} is not supported; write its value"
                )
            return [piece.text], False
        values, index, otherwise = self.known(name), found.group(3), found.group(4) or ""
        self.used.add(name)
        if index == "*" and piece.quoted:
            values = [" ".join(values)]
        elif index not in ("@", "*"):
            values = values[int(index or 0) :][:1] or [""]
        if otherwise == ":-" and not any(values):
            values = [found.group(5)]
            if not _SIMPLE.fullmatch(values[0]):
                raise UserError(f"{shortened(piece.text)}: this expansion is not supported; write its value")
        return values, True

    def _computed(self, found: re.Match[str]) -> tuple[list[str], bool]:
        """Returns the value of `$((...))`; if only a shell can compute it, the text with known values filled in."""

        def value(name: re.Match[str]) -> str:
            bare = name.group().strip("${}")
            if bare not in self.values:
                return name.group()
            self.used.add(bare)
            text = (self.known(bare) or [""])[0].strip()
            if not re.fullmatch(r"-?\d+", text):
                raise UserError(f"{shortened(found.group())}: {bare} is not an integer; write the result")
            return f"({text})" if text.startswith("-") else text

        text = re.sub(r"\$\{[A-Za-z_]\w*\}|\$?\b[A-Za-z_]\w*", value, found.group(1))
        try:
            return [str(_number(ast.parse(text.strip(), mode="eval").body))], True
        except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
            return [f"$(({text}))"], False


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _number(left), _number(right)
            if type(op) in _OPERATIONS or (type(op) in _ROUNDED and min(a, b) >= 0):
                value = int((_OPERATIONS | _ROUNDED)[type(op)](a, b))
                if abs(value) < 2**63:
                    return value
    raise ValueError("a shell's arithmetic")

"""Splits text into the words of a shell's commands, and marks quoted and expandable parts of each word."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainer.config.errors import UserError, shortened

_DOLLAR, _TICK = "\ue000", "\ue001"  # stand for a $ and a backtick that quotes make literal; see `unquoted`
_OPERATOR = re.compile(r"\n|&&|\|\||;;|;|&(?!>)|[|()]")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>&|>\||<&|[<>])")
_EXPANDS = r"[\w{(@*#?!$-]"  # the character after a dollar sign that starts an expansion
_NOT_READ = re.compile(r"<<-?|[<>]\(|<[A-Za-z][^<>\n]*>")  # here-documents, process substitutions, placeholders
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BLANKS = re.compile(r"[ \t\n]+")
_PLAIN = re.compile(r"[^ \t\n'\"\\$`;&|()<>]+")
_NAMED = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?!$-])")
_PAIRS = {"$(": "()", "${": "{}"}


class Piece(NamedTuple):
    """A part of a word.

    `expands`: whether a shell expands the part, which then begins with a dollar sign or a backtick.
    """

    text: str
    quoted: bool = False
    expands: bool = False


class Word(NamedTuple):
    """A word of a command.

    For an array NAME=(WORDS), `pieces` are the parts of NAME=, and `items` are WORDS; otherwise `items` is None.
    """

    pieces: list[Piece]
    items: "list[Word] | None" = None

    @property
    def bare(self) -> str:
        """The text of the word before its first quote or expansion."""
        first = self.pieces[0] if self.pieces else Piece("", True)
        return "" if first.quoted or first.expands else first.text

    @property
    def source(self) -> str:
        return "".join(piece.text for piece in [*self.pieces, *(p for item in self.items or () for p in item.pieces)])


def commands(text: str) -> Iterator[tuple[list[Word], str]]:
    """Yields each simple command's words, without redirections, and the operator that ends the command.

    Raises:
      UserError: quotes or brackets do not match; or there is a here-document, $'...', or a placeholder like <NAME>.
    """
    # A backslash followed by blanks also continues the line, because pasting can add blanks.
    text = re.sub(r"\\[ \t]*\n", "", text.replace("\r\n", "\n"))
    words: list[Word] = []
    at, redirected = 0, False
    while at < len(text):
        if text[at] in " \t":
            at += 1
        elif text[at] == "#":
            at = (text + "\n").index("\n", at)
        elif found := _OPERATOR.match(text, at):
            yield words, found.group()
            words, at = [], found.end()
        elif found := _NOT_READ.match(text, at):
            raise UserError(f"{found.group()}: a shell reads it as a redirection; write a value")
        elif found := _REDIRECTION.match(text, at):
            redirected, at = True, found.end()
        else:
            word, at = _word(text, at)
            words += [] if redirected else [word]
            redirected = False
    yield words, "\n"


def _word(text: str, at: int) -> tuple[Word, int]:
    """Returns the word that begins at `at`, and its end."""
    pieces: list[Piece] = []
    while at < len(text):
        letter = text[at]
        if plain := _PLAIN.match(text, at):
            pieces.append(Piece(plain.group()))
            at = plain.end()
        elif letter == "'":
            end = _found(text, "'", at + 1)
            pieces.append(Piece(_as_text(text[at + 1 : end]), quoted=True))
            at = end + 1
        elif letter == '"':
            end = _end_of_double(text, at)
            pieces += _pieces(text[at + 1 : end - 1]) or [Piece("", quoted=True)]
            at = end
        elif letter == "\\":
            pieces.append(Piece(_as_text(text[at + 1 : at + 2]), quoted=True))
            at += 2
        elif letter in "$`":
            end = end_of_expansion(text, at)
            if text[at : at + 2] in ("$'", '$"'):
                raise UserError(f"{shortened(text[at:])}: $ before quotes is not supported; write the value")
            pieces.append(Piece(text[at:end], expands=end > at + 1) if end > at else Piece(letter))
            at = max(end, at + 1)
        elif letter == "(" and len(pieces) == 1 and ASSIGNED.fullmatch(Word(pieces).bare):
            return _array(pieces, text, at)
        else:
            break
    return Word(pieces), at


def _array(pieces: list[Piece], text: str, at: int) -> tuple[Word, int]:
    end = _balanced(text, at, "()")
    inner = [word for words, _ in commands(text[at + 1 : end - 1]) for word in words]
    return Word(pieces, inner), end


def _pieces(text: str) -> list[Piece]:
    """Returns the pieces of text within double quotes."""
    pieces: list[Piece] = []
    at = 0
    while at < len(text):
        end = end_of_expansion(text, at) if text[at] in "$`" else at
        if end > at:
            pieces.append(Piece(text[at:end], quoted=True, expands=True))
        else:
            escaped = text[at] == "\\" and text[at + 1 : at + 2] in tuple('$`"\\')
            plain = _as_text(text[at + 1]) if escaped else text[at]
            pieces.append(Piece(plain, quoted=True))
            end = at + 1 + escaped
        at = end
    return pieces


def _as_text(quoted: str) -> str:
    return quoted.replace("$", _DOLLAR).replace("`", _TICK)


def has_variable(text: str) -> bool:
    """Returns whether a part of `text` is unknown because only a shell can expand it."""
    return bool(re.search(rf"\${_EXPANDS}|`", text))


def unquoted(field: str, as_code: bool = False) -> str:
    """Returns a field of `Shell.fields` as plain text, or as code for another shell.

    Raises:
      UserError: quotes make a $ or backtick literal, but in plain text, without quotes, it would start an expansion.
    """
    text = field.replace(_DOLLAR, "$").replace(_TICK, "`")
    if not as_code and re.search(_DOLLAR + _EXPANDS + "|" + _TICK, field):
        raise UserError(f"{shortened(text)}: quotes make a $ or backtick in it literal, which is not supported")
    return text


def split_at_blanks(text: str) -> list[str]:
    """Returns the parts of `text` between blanks. Ignores blanks within expansions, which only a shell can split."""
    parts, begin, at = [], 0, 0
    while at < len(text):
        if found := _BLANKS.match(text, at):
            parts.append(text[begin:at])
            begin = at = found.end()
        else:
            at = max(end_of_expansion(text, at) if text[at] in "$`" else at, at + 1)
    return [*parts, text[begin:]]


def end_of_expansion(text: str, at: int) -> int:
    """Returns the end of the expansion that begins at `at`; `at` if the character at `at` is literal."""
    if text[at] == "`":
        end = _found(text, "`", at + 1)
        while text[end - 1] == "\\":
            end = _found(text, "`", end + 1)
        return end + 1
    if pair := _PAIRS.get(text[at : at + 2]):
        return _balanced(text, at + 1, pair)
    found = _NAMED.match(text, at)
    return found.end() if found else at


def _balanced(text: str, at: int, pair: str) -> int:
    """Returns the position after the bracket that closes the bracket at `at`."""
    depth, begin = 0, at
    while at < len(text):
        if text[at] == "'":
            at = _found(text, "'", at + 1)
        elif text[at] == '"':
            at = _end_of_double(text, at) - 1
        elif text[at] == "\\":
            at += 1
        else:
            depth += (text[at] == pair[0]) - (text[at] == pair[1])
        at += 1
        if not depth:
            return at
    raise _unmatched(text, begin)


def _end_of_double(text: str, at: int) -> int:
    begin, at = at, at + 1
    while at < len(text) and text[at] != '"':
        end = end_of_expansion(text, at) if text[at] in "$`" else at
        at = max(end, at + 1 + (text[at] == "\\"))
    if at >= len(text):
        raise _unmatched(text, begin)
    return at + 1


def _found(text: str, letter: str, begin: int) -> int:
    at = text.find(letter, begin)
    if at < 0:
        raise _unmatched(text, begin - 1)
    return at


class Unfinished(UserError):
    """A quote or a bracket is not closed."""


def _unmatched(text: str, at: int) -> Unfinished:
    return Unfinished(f"{shortened(text[at:])}: not a shell command: {text[at]} is not closed")

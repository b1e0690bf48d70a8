"""A progress line that is rewritten at the bottom of a terminal, below the permanent lines."""

from typing import TextIO

_WIDTH = 20  # characters
_CLEAR = "\r\x1b[K"  # moves to the first column and erases the line


def bar(done: int, total: int) -> str:
    """Returns a progress bar for `done` of `total`."""
    filled = _WIDTH * done // total if total else _WIDTH
    return f"[{'#' * filled}{'-' * (_WIDTH - filled)}]"


class BottomLine:
    """The last line of the terminal `stream`, which is rewritten repeatedly."""

    def __init__(self, stream: TextIO):
        self._stream, self._line = stream, ""

    def show(self, line: str) -> None:
        """Replaces the bottom line with `line`, which must be shorter than the terminal's width."""
        self._line = line
        self._stream.write(_CLEAR + line)
        self._stream.flush()

    def above(self, line: str) -> None:
        """Prints `line` above the bottom line."""
        self._stream.write(f"{_CLEAR if self._line else ''}{line}\n{self._line}")
        self._stream.flush()

    def end(self) -> None:
        """Removes the bottom line."""
        if self._line:
            self._line = ""
            self._stream.write(_CLEAR)
            self._stream.flush()

"""A line at the bottom of a terminal that shows how far a run is, below the lines that stay."""

from typing import TextIO

_WIDTH = 20  # characters
_CLEAR = "\r\x1b[K"  # back to the first column, and erase to the end of the line


def bar(done: int, total: int) -> str:
    """`done` of `total` as a bar."""
    filled = _WIDTH * done // total if total else _WIDTH
    return f"[{'#' * filled}{'-' * (_WIDTH - filled)}]"


class BottomLine:
    """The last line of the terminal `stream`, which is written again and again."""

    def __init__(self, stream: TextIO):
        self._stream, self._line = stream, ""

    def show(self, line: str) -> None:
        """`line`, shorter than the terminal is wide, replaces the bottom line."""
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

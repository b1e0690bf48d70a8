"""Formats numbers and text for messages."""

import unicodedata

# The marks before and after text that contributes to the loss: the first pair on a terminal, the second elsewhere.
TRAINED_COLOUR, TRAINED_PLAIN = ("\x1b[1;32m", "\x1b[0m"), ("\u00ab", "\u00bb")


def counted(number: int, one: str, many: str = "") -> str:
    """Returns `number` with its noun: "1 step", "2,000 steps". `many`: the plural, by default `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def sized(count: int) -> str:
    """Returns a number of bytes with its unit: "2.00 GB", "0.05 MB"."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def visible(text: str, keep: str = "\n\t") -> str:
    """Returns `text` with escapes for characters that could control a terminal or that a terminal cannot show: the
    Unicode categories Cc (except `keep`), Cs, Zl and Zp, and marks that change the direction of the text after them.

    https://www.unicode.org/reports/tr9/#Directional_Formatting_Characters
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(ord(char)) if char not in keep and _controls(char) else char for char in text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _controls(char: str) -> bool:
    reverses = unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return reverses or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")

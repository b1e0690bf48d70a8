"""Decodes the text of records: replaces lone surrogates, and detects encodings other than UTF-8."""

import codecs
import re

REPLACEMENT = "\ufffd"
# The bytes of a surrogate whose code point is encoded in UTF-8 (WTF-8). No other character begins with these bytes.
_SURROGATE_BYTES = re.compile(rb"\xed[\xa0-\xbf]")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# The first four bytes of texts that begin with ASCII in UTF-16 or UTF-32 without a byte order mark: one entry for each
# encoding, with True for each byte that is 0.
_ASCII_ZEROS = [(False, True) * 2, (True, False) * 2, (False, True, True, True), (True, True, True, False)]
GZIP = b"\x1f\x8b\x08"  # the first bytes of a gzip file


def mended(text: str) -> tuple[str, int]:
    """Returns `text` with each lone surrogate replaced by U+FFFD, and the number of lone surrogates. A surrogate pair
    becomes the character that it encodes.

    JSON can contain half of a pair, as in "\\ud83d", if a program cut a text between the halves. Half a pair is not a
    character, so no tokenizer accepts it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        replaced = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return replaced, replaced.count(REPLACEMENT) - text.count(REPLACEMENT)
    return text, 0


def decoded(data: bytes) -> tuple[str, int]:
    """Decodes UTF-8, including surrogates, and applies `mended`. Raises UnicodeDecodeError for other bytes."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        return mended(data.decode("utf-8", "surrogatepass"))


def canonical(value: str | bytes) -> bytes:
    """Returns a text, given as str or UTF-8 bytes, as UTF-8 bytes with lone surrogates replaced (`mended`). The result
    for a str equals the result for its bytes. Bytes that are not UTF-8 are returned unchanged."""
    if isinstance(value, str):
        return mended(value)[0].encode()
    if not _SURROGATE_BYTES.search(value):
        return value
    try:
        return decoded(value)[0].encode()
    except UnicodeDecodeError:
        return value


def encoding_hint(data: bytes) -> str:
    """Returns the probable format of `data`, which is not valid UTF-8, as a phrase to append to a message; "" if
    unknown."""
    zeros = tuple(byte == 0 for byte in data[:4])
    if data.startswith(GZIP):
        return " (it looks like gzip)"
    if data.startswith(_UTF_16) or zeros in _ASCII_ZEROS:
        return " (it looks like UTF-16 or UTF-32)"
    return " (it has NUL bytes, as after a power cut)" if b"\0" in data else ""

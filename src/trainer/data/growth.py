"""Limits how much a normalizer in a tokenizer.json can lengthen a text.

The `tokenizers` package already applies the normalizer to the names of added tokens while it loads the file, so the
file must be checked before it is loaded.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.json_files import parsed
from trainer.config.limits import ADDED_CHARACTERS, GROWTH, NORMALIZERS

# Maps the type of a normalizer to the maximum number of characters that it produces from one character.
_FORMS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 9, "ByteLevel": 4}


def growth_problem(text: str) -> str:
    """Returns a message if the normalizer in `text`, the content of a tokenizer.json, lengthens texts too much or has a
    damaged charsmap; otherwise "". The `tokenizers` package itself reports other malformed normalizers."""
    try:
        steps = list(_steps(parsed(text)["normalizer"] or {}))
        if len(steps) > NORMALIZERS:
            return f"it has {len(steps):,} normalizers, more than {NORMALIZERS}"
        factor = added = 1
        for step in steps:
            times = _times(step)
            if times is None:
                return "its precompiled_charsmap is damaged"
            factor, added = factor * times, added * times + len(step.get("prepend") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    if factor > GROWTH:
        return f"its normalizer can make a text more than {GROWTH:,} times as long"
    if added - factor > ADDED_CHARACTERS:
        return f"its normalizer adds {added - factor:,} characters, more than {ADDED_CHARACTERS:,}"
    return ""


def _steps(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normalizer, in order."""
    if spec.get("type") != "Sequence":
        yield spec
    for step in spec.get("normalizers") or ():
        yield from _steps(step)


def _times(spec: Mapping[str, Any]) -> int | None:
    """Returns the maximum number of characters that a step produces from one character. Returns None if the step's
    charsmap is damaged."""
    match spec:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return max(1, -(-len(new) // len(old)) if old else 1 + len(new))
        case {"type": "Replace", "content": new}:  # a regular expression may also match between characters
            return 1 + len(new)
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return _longest(charsmap)
    return _FORMS.get(spec.get("type", ""), 1)


def _longest(charsmap: str) -> int | None:
    """Returns the number of characters of the longest replacement text in a sentencepiece charsmap, at least 1. Returns
    None if the trie extends past the end of the charsmap. `charsmap` is the base64 encoding of the size of the trie,
    the trie itself, and the replacement texts, each terminated by a NUL."""
    data = base64.b64decode(charsmap)
    start = 4 + int.from_bytes(data[:4], "little")
    texts = (len(text.decode(errors="replace")) for text in data[start:].split(b"\0"))
    return max(1, *texts) if start <= len(data) else None

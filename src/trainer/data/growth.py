"""How much longer a normalizer of a tokenizer.json can make a text.

The package applies it already while it reads the file, to the names of added tokens.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from trainer.config.json_files import parsed
from trainer.config.limits import ADDED_CHARACTERS, GROWTH

# The most characters that Unicode's forms and the package's own normalizers make of one.
_FORMS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 9, "ByteLevel": 4}


def growth_problem(text: str) -> str:
    """Returns what is wrong with the normalizer in the `text` of a tokenizer.json; "" if nothing is, or if the package
    will refuse the file."""
    try:
        factor, added = _growth(parsed(text)["normalizer"] or {}, 1, 0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    if factor > GROWTH:
        return f"its normalizer can make a text more than {GROWTH:,} times as long"
    return (
        f"its normalizer adds {added:,} characters, more than {ADDED_CHARACTERS:,}" if added > ADDED_CHARACTERS else ""
    )


def _growth(spec: Mapping[str, Any], factor: int, added: int) -> tuple[int, int]:
    """Returns (f, a): a text of n characters has at most f * n + a after a step, if it had factor * n + added
    before it."""
    times = _FORMS.get(spec.get("type", ""), 1)
    match spec:
        case {"type": "Sequence", "normalizers": steps}:
            for step in steps:
                factor, added = _growth(step, factor, added)
                if max(factor, added) > 1 << 62:
                    break
        case {"type": "Prepend", "prepend": text}:
            added += len(text)
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            times = -(-len(new) // len(old)) if old else 1 + len(new)
        case {"type": "Replace", "content": new}:  # a regular expression, which may match nothing between characters
            times = 1 + len(new)
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            times = _longest(charsmap)
    return factor * max(1, times), added * max(1, times)


def _longest(charsmap: str) -> int:
    """Returns the length of the longest text in a map of sentencepiece: a trie, and texts that end with 0."""
    try:
        data = base64.b64decode(charsmap)
    except binascii.Error:
        return 1
    return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))

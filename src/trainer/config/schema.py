"""The schema, parsed from base.yml. The first lines of that file describe the comments that restrict a key."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BASE_YML = Path(__file__).parents[1] / "base.yml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times faster
# Devices store counts as 32-bit integers, and other numbers with at most the precision of float32.
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4e38

# MaxText's groups of keys: `lora.lora_rank` is another spelling of `lora_rank`.
GROUPS = ("lora", "dpo", "rl")

_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "any": object}
_TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a dict"}
_HEADING = re.compile(r"# -{2,} (?P<name>.+?) -+")
_KEY_LINE = re.compile(r"(?P<name>[a-z]\w*):(?P<value>.*?)(?:\s#(?P<form>.*))?")
# An import path, for example for decoder_block.
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_OR_IMPORT_PATH = " or package.module:name"
_OR_NONE = " or none"
_RANGE = re.compile(r"in (?P<open>[\[(])(?P<low>\S+), (?P<high>\S+)(?P<close>[\])])(?: or (?P<extra>.+))?")


@dataclass(frozen=True)
class Range:
    """The numbers between `low` and `high`, with or without the ends, and the additional values `extras`."""

    low: float
    high: float
    includes_low: bool
    includes_high: bool
    extras: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low
        below = value <= self.high if self.includes_high else value < self.high
        return (above and below) or value in self.extras

    def __str__(self) -> str:
        brackets = "[" if self.includes_low else "(", "]" if self.includes_high else ")"
        extras = "".join(f" or {extra:.12g}" for extra in self.extras)
        return f"in {brackets[0]}{self.low:.12g}, {self.high:.12g}{brackets[1]}{extras}"


@dataclass(frozen=True)
class Key:
    """One key of base.yml. `item` is the type of a list's items (object: any), `doc` the comment above the key."""

    name: str
    default: Any
    kind: type
    section: str = ""
    doc: str = ""
    choices: tuple[Any, ...] = ()
    importable: bool = False  # whether an import path is also allowed
    range: Range | None = None
    item: type | None = None
    optional: bool = False

    @property
    def allowed(self) -> str:
        """The values that the key accepts, in words."""
        if self.choices:
            words = ", ".join(str(choice) or '""' for choice in self.choices)
            return words + _OR_IMPORT_PATH if self.importable else words
        words = _TYPE_WORDS[self.kind]
        if self.range:
            words += f" {self.range}"
        if self.item not in (None, object):
            words += f" of {self.item.__name__}"
        return words + (" or none" if self.optional else "")

    def accepts(self, value: Any) -> bool:
        """Returns whether `value`, which has the key's type, is one of its choices or in its range."""
        if value is None:
            return self.optional
        if self.importable and IMPORT_PATH.fullmatch(value):
            return True
        return (not self.choices or value in self.choices) and (self.range is None or value in self.range)


@dataclass(frozen=True)
class Schema:
    """All keys in the order of the file, and the introduction of each section."""

    keys: dict[str, Key]
    intros: dict[str, str] = field(default_factory=dict)


@functools.cache
def schema() -> Schema:
    """Returns the schema of the trainer."""
    return parse(BASE_YML.read_text(encoding="utf-8"))


def plain_name(name: str) -> str:
    """Returns the key that `name` stands for. A key of a group may be written with the group: lora.lora_rank stands for
    `lora_rank`, and dpo.algo for `dpo_algo`."""
    group, dot, rest = name.partition(".")
    key = rest if group in rest.split("_") else f"{group}_{rest}"
    return key if dot and group in GROUPS and key in schema().keys else name


def parse(text: str) -> Schema:
    """Returns the schema in `text`. Raises ValueError if a line is malformed, or a default contradicts its comment."""
    defaults = yaml.load(text, Loader=LOADER)
    result = Schema({})
    section = ""
    block: list[str] = []
    lines = text.splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if heading := _HEADING.fullmatch(line):
            section, block = heading["name"], []
        elif line.startswith("#"):
            # A comment below a key starts a new block. Keys without a comment share the previous block.
            block = [*block, line[1:].removeprefix(" ")] if above.startswith("#") else [line[1:].removeprefix(" ")]
        elif match := _KEY_LINE.fullmatch(line):
            name, form = match["name"], (match["form"] or "").strip()
            result.keys[name] = _key(name, defaults[name], form, section, "\n".join(block))
        elif not line.strip():
            if block and section and section not in {key.section for key in result.keys.values()}:
                result.intros[section] = "\n".join(block)
            block = []
        elif not line.startswith((" ", "-")):
            raise ValueError(f"base.yml: cannot read the line {line!r}")
    return result


def _key(name: str, default: Any, form: str, section: str, doc: str) -> Key:
    form = form.partition(";")[0].strip()
    kind: type = type(default)
    narrowed: dict[str, Any] = {}
    if form.startswith("one of "):
        words = form.removeprefix("one of ").removesuffix(_OR_IMPORT_PATH)
        narrowed["choices"] = tuple(_literal(name, kind, word) for word in words.split(","))
        narrowed["importable"] = form.endswith(_OR_IMPORT_PATH) and kind is str
    elif match := _RANGE.fullmatch(form):
        narrowed["range"] = _range(name, kind, match)
    elif form.startswith("list of ") and (kind is list or default is None) and _item_of(form) in _TYPES:
        kind = list
        narrowed["item"] = _TYPES[_item_of(form)]
        narrowed["optional"] = form.endswith(_OR_NONE)
    elif form.endswith(_OR_NONE) and form.removesuffix(_OR_NONE) in ("str", "int", "float", "bool"):
        kind = _TYPES[form.removesuffix(_OR_NONE)]
        narrowed["optional"] = True
    elif form:
        raise ValueError(f"base.yml: {name}: {form!r} is none of the forms that the first lines of the file describe")
    if kind is list and "item" not in narrowed:
        raise ValueError(f"base.yml: {name}: a list needs a comment with the type of its items")
    if kind not in _TYPE_WORDS:
        raise ValueError(f"base.yml: {name}: the type of the default {default!r} is not supported")
    key = Key(name, default, kind, section, doc, **narrowed)
    if not key.accepts(default):
        raise ValueError(f"base.yml: {name}: the default {default!r} is not allowed: {key.allowed}")
    return key


def _item_of(form: str) -> str:
    """Returns the type of the items in the comment `form`, which begins with `list of`."""
    return form.removeprefix("list of ").removesuffix(_OR_NONE)


def _range(name: str, kind: type, match: re.Match[str]) -> Range:
    if kind not in (int, float):
        raise ValueError(f"base.yml: {name}: a range needs a number, but the default is a {kind.__name__}")
    low, high = float(match["low"]), float(match["high"])
    extras: Sequence[str] = match["extra"].split(",") if match["extra"] else ()
    if math.isnan(low) or not low <= high:
        raise ValueError(f"base.yml: {name}: the range {match[0]!r} is empty")
    return Range(low, high, match["open"] == "[", match["close"] == "]", tuple(float(extra) for extra in extras))


def _literal(name: str, kind: type, word: str) -> Any:
    word = word.strip()
    if kind is str:
        return "" if word == '""' else word
    if kind in (int, float):
        return kind(word)
    raise ValueError(f"base.yml: {name}: a choice needs text or a number, but the default is a {kind.__name__}")

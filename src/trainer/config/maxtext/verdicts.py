"""How MaxText's keys that are not in our base.yml are handled. keys.yml lists them, and is read only when needed."""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config.dump import to_flow
from trainer.config.errors import shortened
from trainer.config.schema import LOADER, Key
from trainer.config.values import NO_VALUE

TABLE = Path(__file__).parent / "keys.yml"
RENAMED, NEEDLESS, NOT_YET, NEVER = "renamed", "needless", "not yet", "never"


@dataclass(frozen=True)
class Verdict:
    """How a key of MaxText is handled.

    Attributes:
      kind: RENAMED, NEEDLESS, NOT_YET (not supported yet) or NEVER (not supported).
      why: for needless keys, why the key has no effect; for others, what to use instead.
      neutral: the values that have no effect; None if every value is accepted.
      to: for a renamed key, the key of base.yml that replaces it.
    """

    name: str
    kind: str
    why: str
    neutral: tuple[Any, ...] | None = ()
    to: str = ""

    def accepts(self, read: Callable[[Key], Any]) -> bool:
        """Returns whether the value that the user gives is accepted, because it has no effect. `read(key)` returns this
        value, parsed by the type of `key`."""
        return self.neutral is None or any(_same(self.name, value, read) for value in self.neutral)

    def problem(self, given: str) -> str:
        """Returns the error message for the value `given`, which is not accepted."""
        if self.kind == RENAMED:
            return f"{self.why}; write {self.to}={given}"
        allowed = shortened(" or ".join(to_flow(value) for value in self.neutral or ()))
        only = f" (only {allowed} is accepted)" if allowed else ""
        instead = "" if self.why.startswith("leave it out") else "instead: "
        return f"{'not supported yet' if self.kind == NOT_YET else 'not supported'}{only}; {instead}{self.why}"


@dataclass(frozen=True)
class Accepted:
    """A MaxText key with a value that has no effect."""

    verdict: Verdict
    given: str


def find(name: str) -> Verdict | None:
    """Returns the verdict on MaxText's key `name`; None if MaxText has no such key, or if our base.yml has the key,
    too."""
    return verdicts().get(name)


@functools.cache
def verdicts() -> Mapping[str, Verdict]:
    """Returns a dict from the name of each MaxText key in keys.yml to the verdict on the key."""
    by_key = {}
    for group in table()["groups"]:
        kind, why, to = group["verdict"], group["why"], group.get("to", "")
        keys = dict.fromkeys(group["keys"]) if kind == NEEDLESS else group["keys"]
        for name, values in keys.items():
            by_key[name] = Verdict(name, kind, why, None if values is None else tuple(values), to)
        for name in group.get("dependents", ()):
            by_key[name] = Verdict(name, kind, f"MaxText reads it only with {_list(list(group['keys']), 3)}", None)
    return by_key


def former_defaults(name: str, present: Iterable[str]) -> list[Any] | None:
    """Returns the defaults that key `name` may have in a version of MaxText's base.yml that contains the keys
    `present`.

    Omits neutral values (see `Verdict`) and the values in maxtext.yml. Returns None for a key without former defaults.
    """
    given, rows = set(present), table()["earlier"].get(name)
    if rows is None:
        return None
    return [value for newer, values in rows.items() if newer not in given for value in values]


def is_base(names: Iterable[str]) -> bool:
    """Returns whether a file with the keys `names` is a copy of MaxText's base.yml."""
    given, base = set(names), table()["base"]
    return len(given.intersection(base["gives"])) >= 0.8 * len(base["gives"]) and given.isdisjoint(base["lacks"])


def means_empty(key: Key, text: str) -> bool:
    """Returns whether `text` is an empty value, such as null, that MaxText accepts for `key`; see `empty_value`."""
    no_value = NO_VALUE - ({"~"} if key.kind is str else set())  # in a text key, ~ is the home folder
    return text not in key.choices and text.strip().lower() in no_value and key.name in table()["empty"]


def empty_value(name: str) -> Any:
    """Returns the value that replaces an empty value, such as null, of base.yml's key `name`."""
    return table()["empty"][name]


def value_here(name: str, value: str) -> tuple[str, str]:
    """Returns our name of MaxText's `value` of the key `name`, and what it is; ("", "") if `value` has no other name
    here."""
    row = table()["values"].get(name, {}).get(value, {})
    return row.get("ours", ""), row.get("why", "")


def why_refused(name: str, value: str) -> str:
    """Returns what to use instead of `value`, which MaxText allows for the key `name` and the trainer does not; "" if
    unknown."""
    rows = table()["refused"].get(name, {})
    return next((why for pattern, why in rows.items() if re.fullmatch(pattern, value)), "")


def on_preset(name: str) -> str | None:
    """Returns what to use instead of MaxText's preset `name`, which the trainer lacks; None if MaxText lacks it,
    too."""
    return next((row["why"] for row in table()["presets"] if name in row["names"]), None)


def alias(name: str) -> dict[str, Any] | None:
    """Returns the settings that replace MaxText's model_name `name`: our model_name, and the keys with other values
    than in our preset. Returns None if `name` is not an alias."""
    found: dict[str, Any] | None = table()["aliases"].get(name)
    return found


def nearest_name(word: str) -> str | None:
    """Returns the MaxText key to suggest for the unknown key `word`: a key that is `word` after its last dot, otherwise
    a similar key, otherwise a key that begins with `word` and an underscore; None if there is no such key."""
    names = list(verdicts())
    parts = [name for name in names if name.rpartition(".")[2] == word]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.85)
    longer = sorted((name for name in names if name.startswith(f"{word}_")), key=len)
    return next(iter([*parts, *close, *longer]), None)


def is_prefix(name: str) -> bool:
    """Returns whether MaxText has keys `name.something`."""
    return name in _prefixes()


def notes_of(accepted: Sequence[Accepted]) -> list[str]:
    """Returns notes on accepted keys: one line for all keys with neutral values, and one line for each reason why the
    other keys have no effect."""
    lines = []
    neutral = {row.verdict.name: row.given for row in accepted if row.verdict.neutral is not None}
    if neutral:
        shown = _list([f"{name}={given}" for name, given in neutral.items()])
        lines.append(f"MaxText's keys with values that change nothing here: {shown}")
    reasons: dict[str, list[str]] = {}
    for row in accepted:
        # Do not print the value, which may be a secret such as hf_access_token.
        if row.verdict.neutral is None and row.verdict.name not in (names := reasons.setdefault(row.verdict.why, [])):
            names.append(row.verdict.name)
    return lines + [f"MaxText's {_list(names)} {_verb(names)} nothing here: {why}" for why, names in reasons.items()]


def same_as_any(name: str, values: Iterable[Any], read: Callable[[Key], Any]) -> bool:
    """Returns whether the value that `read` returns is one of `values`."""
    return any(_same(name, value, read) for value in values)


def _list(words: Sequence[str], most: int = 12) -> str:
    left = len(words) - most
    return ", ".join(words[:most]) + (f" and {left} more" if left > 0 else "")


def _verb(names: Sequence[str]) -> str:
    return "changes" if len(names) == 1 else "change"


@functools.cache
def _prefixes() -> frozenset[str]:
    return frozenset(name[:i] for name in verdicts() for i, letter in enumerate(name) if letter == ".")


@functools.cache
def table() -> dict[str, Any]:
    """Returns the content of keys.yml, whose first lines describe it."""
    return yaml.load(TABLE.read_text(encoding="utf-8"), Loader=LOADER)


def _same(name: str, value: Any, read: Callable[[Key], Any]) -> bool:
    """Returns whether `read` returns `value`. As in MaxText, `none` is the empty value of every key, and 1 equals
    1.0."""
    kind = str if value is None else float if type(value) is int else type(value)
    key = Key(name, value, kind, item=object if kind is list else None, optional=kind is str)
    try:
        in_ours = read(key)
    except ValueError:
        return False
    return _text(in_ours) == _text(value) if kind is str else bool(in_ours == value)


def _text(value: Any) -> str:
    return "" if str(value).lower() in ("none", "null", "~") else value

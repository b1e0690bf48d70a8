"""Formats numbers and durations, and shortens lines to a width."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def rate(tokens: float) -> str:
    """Formats the number of trained tokens per second over all devices."""
    return f"{si(tokens, 'tok/s')} trained"


def si(value: float, unit: str) -> str:
    """Formats `value` with three digits and a metric prefix: si(10240, "tok/s") is "10.2 ktok/s"."""
    scale = 0
    while abs(value) >= 999.5 and scale < len(_PREFIXES) - 1:
        value, scale = value / 1000, scale + 1
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {_PREFIXES[scale]}{unit}"


def clock(seconds: float) -> str:
    """Formats `seconds` as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def short_time(seconds: float) -> str:
    """Formats `seconds` with three digits: "104 ms", "6.31 s"."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else si(seconds, "s")


def perplexity(loss: float) -> float:
    """Returns exp(loss); infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Field(NamedTuple):
    """A part of a line. If a line is too long, fields are omitted, highest `drop` first, but never those with
    `drop` = 0."""

    text: str
    drop: int = 0
    style: str = ""


def fit(fields: Sequence[Field], width: int, gap: str = "  ") -> list[Field]:
    """Omits fields until the remaining fields, joined by `gap`, fit in `width` characters, or none of them may be
    omitted. Returns the remaining fields in order."""
    kept = list(fields)
    while len(gap.join(field.text for field in kept)) > width:
        last = max(kept, key=lambda field: field.drop)
        if last.drop == 0:
            break
        kept.remove(last)
    return kept

"""Formatting of numbers and durations."""

import math

import pytest

from trainer.config.words import visible
from trainer.observe.text import Field, clock, fit, perplexity, short_time, si


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00 B"),
        (9.994, "9.99 B"),
        (9.996, "10.0 B"),
        (99.96, "100 B"),
        (999.4, "999 B"),
        (999.6, "1.00 kB"),
        (10240, "10.2 kB"),
        (6.31e10, "63.1 GB"),
        (1e21, "1000 EB"),
        (math.inf, "inf EB"),
        (math.nan, "nan B"),
    ],
)
def test_si(value, text):
    assert si(value, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3599, "0:59:59"), (3600, "1:00:00"), (360061, "100:01:01")],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1044, "104 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (63.14, "63.1 s")]
)
def test_short_time(seconds, text):
    assert short_time(seconds) == text


def test_perplexity():
    assert perplexity(2.0) == math.exp(2)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_control_characters_become_visible():
    assert visible("a\tb\n\x1b[31m\r\x85é") == "a\tb\n\\x1b[31m\\x0d\\x85é"
    assert visible("a\u202eb\u2066") == "a\\u202eb\\u2066", "marks that reverse the direction of the text"
    arabic, family = "\u0645\u0631\u200f", "\U0001f468\u200d\U0001f469"
    assert visible(arabic + family) == arabic + family


def test_fields_are_dropped_by_rank_until_they_fit():
    fields = [Field("step"), Field("lr", drop=2), Field("eta", drop=1), Field("flops", drop=3)]
    widths = {
        21: "step  lr  eta  flops",
        20: "step  lr  eta  flops",
        19: "step  lr  eta",
        12: "step  eta",
        8: "step",
        2: "step",
    }
    for width, line in widths.items():
        assert "  ".join(field.text for field in fit(fields, width)) == line

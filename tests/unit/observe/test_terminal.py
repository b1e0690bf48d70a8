"""Output on a terminal that can move its cursor: colours, and a bar below the permanent lines."""

import re

import pytest
from console_cases import EVALUATION, ROW, written


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def on_terminal(monkeypatch, act, *, colour=False, **changes):
    """Returns what `act(console)` writes to a terminal that can move its cursor."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False) if colour else monkeypatch.setenv("NO_COLOR", "1")
    return written(act, is_terminal=True, **changes)


def shown(text):
    """Returns the permanent lines on a terminal that received `text`, and its bottom line."""
    lines = [""]
    for part in re.split(r"(\r\x1b\[K|\n)", text):
        if part == "\n":
            lines.append("")
        elif part.startswith("\r"):
            lines[-1] = ""
        else:
            lines[-1] += part
    return lines[:-1], lines[-1]


def test_colour_on_a_terminal_alone(monkeypatch):
    def act(console):
        console.step(ROW, 700)
        console.end_bar()
        console.sample("def ", "def f")

    plain = on_terminal(monkeypatch, act)
    coloured = on_terminal(monkeypatch, act, colour=True)
    assert "\x1b[1mloss 4.821\x1b[0m" in coloured
    assert "\x1b[1mdef \x1b[0mf\n" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    assert not re.search(r"\x1b\[\d+m", plain)
    assert "\x1b" not in written(act)
    monkeypatch.setenv("TERM", "dumb")
    assert written(act, is_terminal=True).splitlines() == shown(plain)[0]


@pytest.mark.parametrize("columns", [30, 60, 80, 130])
def test_a_bar_below_the_lines_that_stay(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    def act(console):
        for step in range(25):
            console.step(ROW | {"step": step, "step_time": 2.0}, 100)
        console.evaluation(EVALUATION)

    lines, bottom = shown(on_terminal(monkeypatch, act))
    # The first step, and then one in four (100 steps / 25).
    steps = [line.split("/")[0].strip() for line in lines if "/100" in line]
    assert steps == ["0", "3", "7", "11", "15", "19", "23"]
    assert "evaluation at step 350" in lines[-1]
    assert " 24/100  loss 4.821" in bottom
    assert len(bottom) < columns
    assert bottom.startswith("[#####---------------]") == (columns >= 80)


def test_the_bar_is_gone_after_the_last_step_and_when_the_run_fails(monkeypatch):
    rows = [ROW | {"step": step} for step in range(3)]
    assert shown(on_terminal(monkeypatch, lambda console: [console.step(row, 3) for row in rows]))[1] == ""
    failed = on_terminal(monkeypatch, lambda console: (console.step(ROW, 700), console.end_bar()))
    assert shown(failed)[1] == ""
    assert not failed.endswith("\n")  # Python's next output must start in the first column
    assert failed.endswith("\r\x1b[K")

"""Which processes are reported as late."""

import json

from trainer.observe.goodput import GOODPUT_FILE, Timeline, read_goodput
from trainer.observe.stragglers import Stragglers

HOSTS = ["a", "b", "c", "d"]


def said(periods, period=10, written=None):
    """Returns the lines of process 0. `periods` has each process's own time per step, for each period. All steps take 1
    s. The rows that it writes are added to `written`."""
    lines, gathered, rows = [], [], [] if written is None else written

    process = Stragglers(
        period, HOSTS[: len(periods[0])], lambda means: lambda: gathered.pop(0), lines.append, rows.append
    )
    for number, own in enumerate([*periods, (0, 0, 0, 0)]):
        gathered.append([[seconds, seconds / 2, 1.0] for seconds in own])
        for step in range(number * period, (number + 1) * period):
            process.add(step, own[0], own[0] / 2, 1.0)
    return lines


def test_the_fifth_period_in_a_row_names_a_process_once():
    late, early = (0.0, 0.0, 0.95, 0.05), (0.0, 0.0, 0.09, 0.0)
    assert said([late] * 4) == []
    assert said([late] * 4 + [early] + [late] * 4) == []
    line = "process 2 of 4 (c) keeps the others waiting: its host takes 0.950 s of a step of 1.000 s (median of all "
    assert said([late] * 12) == [f"{line}processes: 0.000 s), including 0.475 s of waiting for data"]
    assert len(said([late] * 5 + [early] + [late] * 5)) == 2
    assert said([(0.95, 0.95, 0.95, 0.95)] * 9) == [], "all hosts are slow"


def test_the_slower_of_two_is_not_compared_with_its_own_half():
    assert said([(0.93, 0.95)] * 5) == []
    (line,) = said([(0.8, 0.95)] * 5)
    assert line.startswith("process 1 of 2 (b) keeps the others waiting: its host takes 0.950 s of a step of 1.000 s")


def test_the_times_of_each_period_are_written(tmp_path):
    rows = []
    assert said([(0.0, 0.0, 0.95, 1 / 3), (0.0, 0.0, 0.0, 0.5)], written=rows) == []
    assert [(row["step"], row["host_time"]) for row in rows] == [(9, [0, 0, 0.95, 0.3333]), (19, [0, 0, 0, 0.5])]
    assert rows[0]["data_wait"] == [0, 0, 0.475, 0.1667]
    assert rows[0]["step_time"] == [1] * 4
    with Timeline() as timeline:
        timeline.open(tmp_path, True, True, print, lambda: None)
        timeline.step(0)
        timeline.add(rows[0])
        timeline.finish()
    lines, spent = (tmp_path / GOODPUT_FILE).read_text().splitlines(), read_goodput(tmp_path).seconds()
    assert json.loads(lines.pop(2)) == rows[0]
    (tmp_path / GOODPUT_FILE).write_text("\n".join(lines))
    assert read_goodput(tmp_path).seconds() == spent, "it is not an event"


def test_own_time_counts_where_devices_wait_for_it():
    sent = []
    process = Stragglers(2, HOSTS, lambda means: sent.append(means.tolist()), print, print)
    for step, own in enumerate((0.8, 0.5, 0.8, 0.95)):
        process.add(step, own, 0.25, 1.0)
    assert sent == [[0.0, 0.25, 1.0], [0.475, 0.25, 1.0]]

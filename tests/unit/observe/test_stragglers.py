"""Which processes are reported as late."""

from trainer.observe.stragglers import Stragglers

HOSTS = ["a", "b", "c", "d"]


def said(periods, period=10):
    """Returns the lines of process 0. `periods` has each process's own time per step, for each period. All steps take 1
    s."""
    lines, gathered = [], []

    process = Stragglers(period, HOSTS, lambda means: lambda: gathered.pop(0), lines.append)
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
    assert said([late] * 12) == [f"{line}processes: 0.025 s), including 0.475 s of waiting for data"]
    assert len(said([late] * 5 + [early] + [late] * 5)) == 2
    assert said([(0.95, 0.95, 0.95, 0.95)] * 9) == [], "all hosts are slow"


def test_own_time_counts_where_devices_wait_for_it():
    sent = []
    process = Stragglers(2, HOSTS, lambda means: sent.append(means.tolist()), print)
    for step, own in enumerate((0.8, 0.5, 0.8, 0.95)):
        process.add(step, own, 0.25, 1.0)
    assert sent == [[0.0, 0.25, 1.0], [0.475, 0.25, 1.0]]

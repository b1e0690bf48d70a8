"""The breakdown of a run's time: each second counts once, across restarts and lost work."""

import json

import pytest

from trainer.observe import goodput
from trainer.observe.goodput import GOODPUT_FILE, Goodput, Timeline, read_goodput

KILLED = [  # saved after step 1, killed during step 3
    {"job_start_time": 100.0},
    {"custom_badput_event_start_time": 104.0, "custom_badput_event_type": "restore"},
    {"custom_badput_event_end_time": 105.0, "custom_badput_event_type": "restore"},
    {"custom_badput_event_start_time": 106.0, "custom_badput_event_type": "compilation"},
    {"custom_badput_event_end_time": 116.0, "custom_badput_event_type": "compilation"},
    {"step_start_time": 117.0, "step_count": 0},
    {"step_start_time": 119.0, "step_count": 1, "data_wait": 0.5},
    {"step_start_time": 121.0, "step_count": 2, "data_wait": 0.0},
    {"custom_badput_event_start_time": 121.5, "custom_badput_event_type": "save"},
    {"custom_badput_event_end_time": 122.5, "custom_badput_event_type": "save"},
    {"step_start_time": 125.0, "step_count": 3, "data_wait": 0.0},
]
RESUMED = [  # repeats step 2, and evaluates at the end of the run
    {"job_start_time": 140.0},
    {"step_start_time": 150.0, "step_count": 2},
    {"step_start_time": 153.0, "step_count": 3, "data_wait": 1.0},
    {"step_start_time": 155.0, "step_count": 4, "data_wait": 0.0},
    {"custom_badput_event_start_time": 155.0, "custom_badput_event_type": "end"},
    {"custom_badput_event_start_time": 156.0, "custom_badput_event_type": "evaluation"},
    {"custom_badput_event_end_time": 159.0, "custom_badput_event_type": "evaluation"},
    {"job_end_time": 160.0},
]
SPENT = {
    "steps": 1.5 + 2 + 2 + 2,
    "waiting for data": 1.5,
    "steps done again": 0.5 + 2.5,  # step 2 of the killed process, which is repeated
    "start": 4 + 1 + 1 + 10,
    "restore": 1,
    "compilation": 10,
    "evaluation": 3,
    "save": 1,
    "end": 2,
    "between processes": 15,
}


def spent(events):
    counted = Goodput()
    for event in events:
        counted.add(event)
    return counted


def test_each_second_counts_once():
    run = spent([*KILLED, *RESUMED])
    assert run.seconds() == SPENT
    assert sum(run.seconds().values()) == 60
    assert run.processes == 2
    assert str(run).startswith("steps 12.5%, waiting for data 2.5%, steps done again 5.0%, start 26.7%, ")
    assert str(run).endswith(", between processes 25.0% of 0:01:00 in 2 processes")


def test_no_time_counts_between_a_finished_run_and_its_continuation():
    later = [{"job_start_time": 900.0}, {"step_start_time": 901.0, "step_count": 4}, {"job_end_time": 903.0}]
    run = spent([*KILLED, *RESUMED, *later])
    assert run.seconds() == SPENT | {"start": SPENT["start"] + 1, "steps": SPENT["steps"] + 2}


@pytest.mark.parametrize(
    "line",
    ["", "[1]", '{"step_start_time": "x", "step_count": 1}', '{"step_start_time": 118', '{"job_start_time": 1e999}'],
)
def test_lines_that_are_no_events(line, tmp_path):
    lines = [json.dumps(event) for event in KILLED + RESUMED]
    (tmp_path / GOODPUT_FILE).write_text("\n".join([*lines[:6], line, *lines[6:]]))
    assert read_goodput(tmp_path).seconds() == SPENT


def test_a_process_records_its_events(tmp_path, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(goodput.time, "time", lambda: 1000 + now[0])
    (tmp_path / GOODPUT_FILE).write_text('{"job_start_time": 1000}\n{"step_start_time": 1010, "step_count": 0}\n{"cut')

    def passes(seconds):
        now[0] += seconds

    with Timeline() as timeline:
        with timeline.during("restore"):
            passes(3)
        timeline.open(tmp_path, True, True, print)
        timeline.step(0)
        passes(4)
        timeline.step(1, data_wait=1.0)
        with timeline.during("evaluation"):
            passes(5)
        timeline.end()
        passes(6)
        timeline.finish()
    parts = {"steps": 3, "waiting for data": 1, "start": 10, "restore": 3, "evaluation": 5, "end": 6}
    assert timeline.goodput.seconds() == parts | {"between processes": 1050 - 1010}
    assert read_goodput(tmp_path).seconds() == timeline.goodput.seconds()


def test_only_one_process_writes(tmp_path):
    with Timeline() as timeline:
        timeline.open(tmp_path, False, True, print)
        timeline.step(0)
    assert timeline.goodput.seconds() == {}
    assert not list(tmp_path.iterdir())

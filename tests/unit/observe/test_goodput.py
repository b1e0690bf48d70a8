"""The breakdown of a run's time: each second counts once, across restarts and lost work."""

import contextlib
import json
import time
from types import SimpleNamespace

import pytest

from trainer import train
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.errors import UserError
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


def test_a_step_of_many_minutes_waited_for_its_rollouts():
    alive = [{"alive_time": 100.0 + seconds} for seconds in range(5, 300, 5)]
    run = spent([{"job_start_time": 99.0}, {"step_start_time": 100.0, "step_count": 0}, *alive])
    assert run.seconds() == {"start": 1, "steps": 295}
    run.add({"step_start_time": 400.0, "step_count": 1, "rollouts_wait": 250.0})
    assert run.seconds() == {"start": 1, "steps": 50, "rollouts": 250}


def test_no_time_counts_between_a_finished_run_and_its_continuation():
    later = [{"job_start_time": 900.0}, {"step_start_time": 901.0, "step_count": 4}, {"job_end_time": 903.0}]
    run = spent([*KILLED, *RESUMED, *later])
    assert run.seconds() == SPENT | {"start": SPENT["start"] + 1, "steps": SPENT["steps"] + 2}


def test_a_clock_that_went_back_is_named():
    run = spent(
        [*KILLED, *({name: at - 20 if "time" in name else at for name, at in event.items()} for event in RESUMED)]
    )
    assert run.seconds() == {part: seconds for part, seconds in SPENT.items() if part != "between processes"}
    assert str(run).endswith(
        " of 0:00:45 in 2 processes; 1 start before the last event of an earlier process (or clocks differ)"
    )
    assert "clock" not in str(spent([*KILLED, *RESUMED, *KILLED])), "a finished run and its continuation"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[1]",
        '{"step_start_time": "x", "step_count": 1}',
        '{"step_start_time": 118',
        '{"job_start_time": 1e999}',
        '{"custom_badput_event_start_time": 117, "custom_badput_event_type": "steps"}',
        '{"custom_badput_event_start_time": 117, "custom_badput_event_type": ["x"]}',
        '{"custom_badput_event_start_time": 117, "custom_badput_event_type": "checked"}',
    ],
)
def test_lines_that_are_no_events(line, tmp_path):
    lines = [json.dumps(event) for event in KILLED + RESUMED]
    (tmp_path / GOODPUT_FILE).write_text("\n".join([*lines[:5], line, *lines[5:]]))
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
        timeline.open(tmp_path, True, True, print, lambda: None)
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
        timeline.open(tmp_path, False, True, print, lambda: None)
        timeline.step(0)
    assert timeline.goodput.seconds() == {}
    assert not list(tmp_path.iterdir())


def test_processes_that_are_killed_during_their_restores(tmp_path, monkeypatch):
    """The clock outside shows 3 x 1000 s of restores, each in a process that is killed, and two pauses of 10 s."""
    now = [50.0]
    monkeypatch.setattr(goodput, "_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(goodput, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0]))
    for _ in range(3):
        killed = Timeline()
        killed.open(tmp_path, True, True, print, lambda: None)
        with contextlib.suppress(KeyboardInterrupt), killed.during("restore"):
            now[0] += 1000
            until = time.monotonic() + 60
            while f'"alive_time": {now[0]}}}' not in (tmp_path / GOODPUT_FILE).read_text():
                assert time.monotonic() < until
                time.sleep(0.01)
            raise KeyboardInterrupt
        killed.__exit__(None, None, None)
        now[0] += 10
    assert read_goodput(tmp_path).seconds() == {"restore": 3000, "between processes": 20}
    assert read_goodput(tmp_path).processes == 3


def test_a_refused_command_leaves_no_events(tmp_path):
    def ends(error, steps=0, other=b""):
        (tmp_path / GOODPUT_FILE).write_bytes(b'{"job_start_time": 1}\n{"cut')
        with contextlib.suppress(UserError, OSError), Timeline() as timeline:
            timeline.open(tmp_path, True, True, print, lambda: None)
            for step in range(steps):
                timeline.step(step)
            with (tmp_path / GOODPUT_FILE).open("ab") as file:
                file.write(other)
            raise error
        return (tmp_path / GOODPUT_FILE).read_bytes().count(b"job_start_time")

    assert ends(UserError("refused")) == 1
    assert (tmp_path / GOODPUT_FILE).read_bytes().endswith(b'{"cut')
    assert ends(OSError("crash")) == ends(UserError("later"), steps=1) == 2
    assert ends(UserError("lost the run"), other=b'{"job_start_time": 2}\n') == 3


@pytest.mark.parametrize("finished", [False, True])
def test_a_resumed_run_counts_its_restore_before_it_ends(tmp_path, monkeypatch, finished):
    for name in ("__init__", "__exit__"):
        monkeypatch.setattr(CheckpointManager, name, lambda *args: None)
    monkeypatch.setattr(CheckpointManager, "latest", 3)
    monkeypatch.setattr(train, "_start", lambda *args: 1 / 0)
    run = SimpleNamespace(config=SimpleNamespace(enable_checkpointing=True))
    run_dir = SimpleNamespace(check=lambda: None, folder=tmp_path, path=tmp_path, finished=finished)
    with pytest.raises(ZeroDivisionError), Timeline() as timeline:
        train._train(None, train.TRAIN, run, None, None, run_dir, timeline, SimpleNamespace(say=print))
    events = (tmp_path / GOODPUT_FILE).read_text() if (tmp_path / GOODPUT_FILE).exists() else ""
    assert ("restore" in events) is not finished, "a finished run may have nothing to do"

"""Which steps of the loop a profile covers. test_train.py has a profile that JAX writes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import arguments

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.observe.profiler import TRACES, Profiler
from trainer.training.build import build
from trainer.training.loop import Reports, fit
from trainer.training.start import Start

VALUES = {"loss": 1.0, "grad_norm": 1.0, "skipped": 0, "finite": 1, "tokens": 8, "learning_rate": 0.1}


class Interrupted(Exception):
    pass


@pytest.fixture
def log(monkeypatch):
    """Records events in order: dispatched and reported steps, and calls of the profiler."""
    happened = []

    def stop():
        happened.append("stop")
        folder = next(each[0] for each in happened if isinstance(each, tuple))
        (folder.parent / TRACES / "2026").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, profiler_options: happened.append((folder, profiler_options))
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    monkeypatch.setattr(jax.profiler, "save_device_memory_profile", lambda path: happened.append("memory"))
    return happened


def profiled(log, folder, *, first=0, interrupted=None, traces=True, **keys):
    """Runs the loop from step `first` on, with a step that computes nothing. Returns the profiler's messages."""
    config = load(arguments("nnx", profiler="xplane", **keys)).config
    run, said = build(config, jax.devices()[:1]), []

    def step(leaves, batch, frozen):
        log.append(f"step {sum(str(each).startswith('step') for each in log) + first}")
        if log[-1] == f"step {interrupted}":
            raise Interrupted
        return leaves, {name: np.asarray(value) for name, value in VALUES.items()}

    with Profiler(run.config, folder, first, said.append, traces=traces) as profiler:
        reports = Reports(
            lambda row: log.append(f"row {row['step']}"), lambda row: None, lambda: None, profiler=profiler
        )
        fit(run, step, Start([], first, resumed=first > 0), open_dataset(run.config, print), reports)
    return said


def shown(log):
    return ["start" if isinstance(each, tuple) else each for each in log]


def test_the_device_is_idle_when_a_trace_starts_and_when_it_stops(log, tmp_path):
    (said,) = profiled(log, tmp_path, steps=5, skip_first_n_steps_for_profiler=1, profiler_steps=2)
    assert shown(log) == (
        ["step 0", "row 0", "start", "step 1", "step 2", "row 1", "row 2", "stop", "memory"]
        + ["step 3", "step 4", "row 3", "row 4"]
    )
    assert said == f"the profile of 2 steps from step 1 on is in {tmp_path / TRACES / '2026'}"
    ((folder, options),) = [each for each in log if isinstance(each, tuple)]
    assert folder == tmp_path / "tensorboard"
    assert options.python_tracer_level == 0


def test_a_process_that_does_not_trace_waits_at_the_same_steps(log, tmp_path):
    """All processes run the program that reads the islands' metrics, so all must dispatch it at the same step."""
    keys = {"steps": 5, "skip_first_n_steps_for_profiler": 1, "profiler_steps": 2}
    assert not profiled(log, tmp_path, traces=False, **keys)
    other = shown(log)
    log.clear()
    profiled(log, tmp_path, **keys)
    assert other == [each for each in shown(log) if each not in ("start", "stop", "memory")]


def test_steps_are_skipped_from_where_a_run_resumes_and_end_with_it(log, tmp_path):
    (said,) = profiled(log, tmp_path, first=3, steps=6, skip_first_n_steps_for_profiler=1, profiler_steps=9)
    assert shown(log)[:3] == ["step 3", "row 3", "start"]
    assert shown(log)[-2:] == ["stop", "memory"]
    assert said.startswith("the profile of 2 steps from step 4 on")


def test_a_trace_begins_every_few_steps(log, tmp_path):
    keys = {"steps": 9, "skip_first_n_steps_for_profiler": 1, "profiler_steps": 2, "profile_periodically_period": 3}
    said = profiled(log, tmp_path, **keys)
    assert [f"{each} at {shown(log)[i + 1]}" for i, each in enumerate(shown(log)) if each == "start"] == [
        *("start at step 1", "start at step 4", "start at step 7"),
    ]
    assert shown(log).count("stop") == 3
    assert [line.partition(" is in ")[0] for line in said] == [
        f"the profile of 2 steps from step {first} on" for first in (1, 4, 7)
    ]
    log.clear()
    assert len(profiled(log, tmp_path, **keys | {"profile_periodically_period": -1})) == 1
    with pytest.raises(UserError, match="a trace would begin before the previous one ends"):
        load(arguments("nnx", profiler="xplane", profile_periodically_period=4))


def test_an_interrupted_run_keeps_its_profile(log, tmp_path):
    with pytest.raises(Interrupted):
        profiled(log, tmp_path, steps=5, skip_first_n_steps_for_profiler=1, profiler_steps=4, interrupted=2)
    assert shown(log)[-3:] == ["step 2", "stop", "memory"]


def test_a_run_that_ends_before_says_so(log, tmp_path):
    (said,) = profiled(log, tmp_path, first=3, steps=4, skip_first_n_steps_for_profiler=1)
    assert said == "no step is profiled: the run ends at step 3, before step 4"
    assert "start" not in shown(log)
    with pytest.raises(UserError, match="the run ends before the first step to profile"):
        load(arguments("nnx", profiler="xplane", steps=4, skip_first_n_steps_for_profiler=4))


def test_the_time_of_a_trace_is_not_that_of_a_step(log, tmp_path, monkeypatch):
    from trainer.training import loop

    clock = [0.0]

    def now():
        clock[0] += 1e-3  # so that no two clock readings are equal
        return clock[0]

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=now))
    start, stop = jax.profiler.start_trace, jax.profiler.stop_trace

    def slow(*args, **keys):
        clock[0] += 100
        (start if keys else stop)(*args, **keys)

    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, slow)
    times, append = [], log.append
    config = load(arguments("nnx", profiler="xplane", steps=4, profiler_steps=2)).config
    run = build(config, jax.devices()[:1])

    def step(leaves, batch, frozen):
        clock[0] += 1
        return leaves, {name: np.asarray(value) for name, value in VALUES.items()}

    with Profiler(run.config, tmp_path, 0, append) as profiler:
        reports = Reports(lambda row: times.append(row["step_time"]), lambda row: None, lambda: None, profiler=profiler)
        fit(run, step, Start([]), open_dataset(run.config, print), reports)
    assert clock[0] > 200
    assert max(times) < 3

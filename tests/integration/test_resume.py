"""Runs that end and resume, with the same command or with a command that changes some allowed keys."""

import itertools
import json
import os
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from compiler import exact
from run_cases import RUN, SETTINGS, arrays_of, assert_equal, killed_at, rows_of, train
from tensorboardX.proto.event_pb2 import Event

from trainer.checkpoint.manager import inspect, newest
from trainer.checkpoint.sums import write_sums
from trainer.data.batches import eval_batches
from trainer.data.dataset import open_dataset
from trainer.objectives.next_token import NextToken
from trainer.observe.console import Console
from trainer.observe.events import EVENTS_FILE
from trainer.observe.goodput import BETWEEN, GOODPUT_FILE, read_goodput
from trainer.observe.metrics import METRICS_FILE
from trainer.runtime.lease import LEASE_FILE

pytestmark = pytest.mark.usefixtures("equal_programs")


def assert_close(run, other, updates, rtol):
    """Compares losses and parameters of runs that add up in different orders.

    Parameters agree only as far as Adam permits: it turns the rounding of a gradient near zero into a full step.
    """
    left, right = ([row["loss"] for row in rows_of(x) if "loss" in row][:updates] for x in (run, other))
    assert len(left) == updates
    np.testing.assert_allclose(left, right, rtol=rtol)
    left, right = (arrays_of(x / f"checkpoints/{updates}") for x in (run, other))
    for name in left:
        if "params" in name:
            assert np.abs(left[name] - right[name]).mean() < 1e-4, name


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns the folder of an uninterrupted run with all its checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    code, output = train(folder)
    assert code == 0, output
    return folder / RUN


@pytest.fixture
def at(straight, tmp_path):
    return lambda updates: killed_at(updates, straight, tmp_path)


def test_the_same_command_goes_on_by_itself(straight, at, tmp_path):
    run = at(30)
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"step": 60, "lo')  # as left by a process that is killed while it writes
    began = time.time()
    code, output = train(tmp_path)  # run_name is empty
    assert code == 0
    took = time.time() - began
    assert f"{RUN} has this configuration and is unfinished: resuming it" in output
    assert f"{RUN}/checkpoints/30: 30 of 60 updates are done" in output
    assert "(30 to 59, resumed)" in output
    assert "in 2 processes" in output
    assert_equal(run, straight)
    events = [json.loads(line) for line in (run / GOODPUT_FILE).read_text().splitlines()]
    begins, ends = [event["job_start_time"] for event in events if "job_start_time" in event][-1], events[-1]
    assert 0.99 * took - 0.3 < ends["job_end_time"] - begins < took, "unlike a clock outside"
    parts = read_goodput(run).seconds()
    assert parts.keys() >= {"steps", "steps done again", "restore", "compilation", "evaluation", "save", BETWEEN}
    assert sum(parts.values()) == pytest.approx(ends["job_end_time"] - events[0]["job_start_time"])
    assert "<h2>Time</h2>" in (run / "report.html").read_text()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-0001"]


@pytest.mark.parametrize("when", ["between two saves", "while a save is written"])
def test_a_run_that_another_machine_takes_commits_nothing_more(when, at, tmp_path, monkeypatch):
    run, step, theirs = at(30), Console.step, '{"id": "theirs", "pid": 1, "host": "there", "since": "now"}'

    def then_taken(console, row, total):
        step(console, row, total)
        if row["step"] == 42:
            while not (run / "checkpoints/40").exists():
                time.sleep(0.01)
            (run / LEASE_FILE).write_text(theirs)

    def taken_meanwhile(folder, *args):
        write_sums(folder, *args)
        if folder.name.startswith("50."):
            (run / LEASE_FILE).write_text(theirs)

    if when == "between two saves":
        monkeypatch.setattr(Console, "step", then_taken)
    else:
        monkeypatch.setattr("trainer.checkpoint.manager.write_sums", taken_meanwhile)
    code, output = train(tmp_path, "run_name=run-0001")
    assert code == 2, output
    assert "error: runs/run-0001: process 1 on there, since now has taken over this run; this process ends" in output
    assert newest(run).name == "40"
    assert (run / LEASE_FILE).read_text() == theirs


def test_sigterm_within_the_last_evaluation(straight, at, tmp_path, monkeypatch):
    """All updates are done, but the run is unfinished: the row of that evaluation is missing."""
    run = at(50)

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return eval_batches(*args, **kwargs)

    monkeypatch.setattr("trainer.training.batches.eval_batches", interrupted)
    code, output = train(tmp_path)
    assert code == 143
    assert f"SIGTERM: saved; the same command continues from here ({RUN})" in output
    assert newest(run).name == "60"
    assert rows_of(run) == rows_of(straight)[:-1]
    monkeypatch.undo()
    code, output = train(tmp_path)
    assert code == 0
    assert "compiling the training step" not in output
    assert_equal(run, straight)


@pytest.mark.rest(covered_by="a run of 1 device that goes on with 8 and 1")
@exact()
def test_unrolled_layers_and_other_reports(at, tmp_path):
    """A run with other loops, logs, evaluations and retained checkpoints has the same bits."""
    run = at(50)
    code, output = train(tmp_path, "run_name=run-0001")
    assert code == 0, output
    expected = arrays_of(newest(run))
    shutil.rmtree(run)
    at(50)
    around = {"eval_interval": 4, "eval_steps": 1, "checkpoint_period": 3, "max_num_checkpoints_to_keep": 2}
    code, output = train(tmp_path, "run_name=run-0001", scan_layers=False, log_config=True, **around)
    assert code == 0, output
    for name, array in arrays_of(newest(run)).items():
        assert array.tobytes() == expected[name].tobytes(), name
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [57, 60]
    assert [row["step"] for row in rows_of(run) if "eval_loss" in row][-3:] == [51, 55, 59]


def test_from_one_device_to_eight_to_one(straight, at, tmp_path):
    run = at(10)
    code, output = train(tmp_path, "run_name=run-0001", devices=8, per_device_batch_size=1, steps=20, eval_interval=-1)
    assert code == 0, output
    code, output = train(tmp_path, "run_name=run-0001", steps=30)
    assert code == 0, output
    assert_close(run, straight, 30, rtol=1e-5)


@pytest.mark.rest(covered_by="a run of 1 device that goes on with 8 and 1")
def test_the_same_batch_in_microbatches(straight, at, tmp_path):
    run = at(50)
    code, output = train(tmp_path, "run_name=run-0001", per_device_batch_size=4, gradient_accumulation_steps=2)
    assert code == 0, output
    assert_close(run, straight, 60, rtol=1e-5)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opt_type": "sgd"}, 'opt_type: "adamw" -> "sgd"'),
        ({"base_mlp_dim": 48}, "base_mlp_dim: 32 -> 48"),
        ({"init_weights_seed": 1, "data_shuffle_seed": 2}, "init_weights_seed: 0 -> 1\n  data_shuffle_seed: 0 -> 2"),
        (
            {"per_device_batch_size": 4},
            "the global batch must not change, 8 -> 4 rows: per_device_batch_size: 8.0 -> 4.0",
        ),
        ({"learning_rate_schedule_steps": 70}, "learning_rate_schedule_steps: 60 -> 70"),
        ({"steps": 20}, "steps=20: runs/run-0001/checkpoints/30 holds 30 updates already; give steps=30 or more"),
    ],
)
def test_what_must_not_change(at, tmp_path, changes, message):
    run = at(30)
    before = files_of(run)
    code, output = train(tmp_path, "run_name=run-0001", **changes)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
    assert files_of(run) == before


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_checkpoint_is_an_error_and_never_a_start_from_nothing(at, tmp_path, damage):
    run = at(30)
    file = max((run / "checkpoints/30/state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if damage == "truncated" else content[:-9] + bytes(9))
    before = files_of(run)
    code, output = train(tmp_path)
    assert code == 2
    assert f"checkpoint {RUN}/checkpoints/30 is damaged: {file.relative_to(run / 'checkpoints/30')} " in output
    assert f"to continue from the previous checkpoint, remove {RUN}/checkpoints/30" in output
    assert files_of(run) == before


def test_a_finished_run_given_again(straight, tmp_path):
    shutil.copytree(straight, tmp_path / RUN)
    before = files_of(tmp_path / RUN)
    code, output = train(tmp_path, "run_name=run-0001")
    assert code == 0
    assert f"{RUN} is finished: nothing to do; to continue it, increase steps" in output
    assert "compiling" not in output
    assert files_of(tmp_path / RUN) == before


@pytest.mark.rest(covered_by="a run of 1 device that goes on with 8 and 1")
def test_without_checkpoints(tmp_path):
    settings = {"enable_checkpointing": False, "steps": 2, "eval_interval": -1, "enable_tensorboard": False}
    assert train(tmp_path, **settings)[0] == 0
    assert {path.name for path in (tmp_path / RUN).iterdir()} == {
        "metrics.jsonl",
        "config.yml",
        "report.html",
        "starts.json",
        "goodput.jsonl",
        "finished",
        ".lock",
    }
    first = (tmp_path / RUN / METRICS_FILE).read_bytes()
    code, output = train(tmp_path, "run_name=run-0001", **settings)
    assert code == 0, output
    assert (
        f"{RUN} holds an earlier run without checkpoints: its files are kept as metrics-1.jsonl, config-1.yml" in output
    )
    assert (tmp_path / RUN / "metrics-1.jsonl").read_bytes() == first
    second = rows_of(tmp_path / RUN)
    assert len(second) == 2
    code, output = train(tmp_path, "run_name=run-0001", **settings | {"enable_checkpointing": True})
    assert code == 0, output
    assert "its files are kept as metrics-2.jsonl, config-2.yml" in output
    assert rows_of(tmp_path / RUN) == second
    before = files_of(tmp_path / RUN)
    code, output = train(tmp_path, "run_name=run-0001", **settings)
    assert code == 2
    assert f"{RUN} holds a run with checkpoints, and enable_checkpointing=false cannot resume it" in output
    assert files_of(tmp_path / RUN) == before


def events_of(run_dir):
    """Returns the sorted tags of each TensorBoard event."""
    with (run_dir / EVENTS_FILE).open("rb") as file:
        while head := file.read(12):
            event = Event.FromString(file.read(int.from_bytes(head[:8], "little")))
            file.read(4)
            if not event.file_version:
                yield sorted(value.tag for value in event.summary.value)


@pytest.mark.rest(covered_by="a run of 1 device that goes on with 8 and 1")
def test_a_run_on_one_batch_of_a_scaled_model_goes_on_with_its_metrics_file(tmp_path):
    settings = {
        "run_name": "one",
        "reuse_example_batch": 1,
        "global_parameter_scale": 2,
        "metrics_file": "metrics.txt",
        "checkpoint_period": 4,
        "eval_interval": 4,
        "eval_steps": 1,
        "dropout_rate": 0.0,
        "learning_rate_schedule_steps": 6,
    }

    def rows_of_file(folder):
        rows = [json.loads(line) for line in (folder / "metrics.txt").read_text().splitlines()]
        return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, counts in ((whole, (6,)), (parts, (4, 6))):
        folder.mkdir()
        for steps in counts:
            code, output = train(folder, **settings | {"steps": steps})
            assert code == 0, output
            assert "base_num_query_heads 4 -> 8" in output
            assert "trains on the first batch only" in output
    assert "checkpoints/4: 4 of 6 updates are done" in output
    assert_equal(parts / "runs/one", whole / "runs/one", updates=6)
    rows = rows_of_file(whole)
    assert rows_of_file(parts) == rows
    page = (parts / "runs/one/report.html").read_text()
    assert "6 of 6" in page
    assert "<td>resumed</td><td>before step 4</td>" in page
    assert re.search(r"<td>steps</td><td>6</td><td>[^<]*</td><td>command line</td>", page)
    assert "<td>params/decoder/decoder_norm/scale</td>" in page
    names = [sorted(row.keys() - {"step", "run_name"}) for row in rows]
    assert [[tag for tag in tags if not tag.startswith("perf/")] for tags in events_of(parts / "runs/one")] == names
    assert [row["step"] for row in rows if "learning/loss" in row] == list(range(6))
    assert [row["step"] for row in rows if "eval/avg_loss" in row] == [3, 5]
    losses = [row["learning/loss"] for row in rows if "learning/loss" in row]
    assert losses == sorted(losses, reverse=True)  # the same batch every time, without dropout


def test_checkpoints_that_cannot_be_written_are_told_before_training(tmp_path):
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "checkpoints").touch()
    code, output = train(tmp_path)
    assert code == 2
    assert f"error: {RUN}/checkpoints is not a folder, but checkpoints are saved below it" in output
    assert "compiling" not in output
    assert not (tmp_path / RUN / "config.yml").exists()


@pytest.fixture
def poisoned(monkeypatch, equal_programs):
    """Replaces the loss of one step's batch by `wrong(loss)`."""

    def poison(step, wrong):
        from trainer.config.load import load

        config = load([f"{key}={value}" for key, value in SETTINGS.items()]).config
        batch = next(itertools.islice(open_dataset(config, print).train_stream(rows=8), step, None))[0]
        mark = int(batch["inputs"].sum())

        class Poisoned(NextToken):
            def sums(self, params, rest, batch, *args, **how):
                sums = super().sums(params, rest, batch, *args, **how)
                loss, hit = sums.minimized["lm_loss"], batch["inputs"].sum() == mark
                return sums._replace(minimized={"lm_loss": jax.numpy.where(hit, wrong(loss), loss)})

        monkeypatch.setattr("trainer.objectives.registry.NextToken", Poisoned)
        equal_programs.clear()

    yield poison
    equal_programs.clear()


@pytest.mark.rest(covered_by="unit/training/test_step.py; unit/training/test_diloco.py")
@pytest.mark.parametrize(
    ("key", "other", "value", "wrong"),
    [
        ("abort_on_nan_loss", "abort_on_inf_loss", "nan", lambda loss: loss + np.nan),
        ("abort_on_inf_loss", "abort_on_nan_loss", "inf", lambda loss: loss + np.inf),
    ],
)
def test_a_step_that_is_not_finite(at, tmp_path, poisoned, key, other, value, wrong):
    poisoned(52, wrong)
    run = at(50)
    code, output = train(tmp_path, "run_name=run-0001", **{other: False})
    assert code == 1
    assert f"stopped: step 52: loss {value}" in output
    assert "Its batch is rows 416 to 423 of the training order (data_shuffle_seed=0)" in output
    assert f"set {key}=false" in output
    assert "Traceback" not in output
    assert newest(run) == run / "checkpoints/50"
    inspect(run / "checkpoints/50")
    updates = rows_of(run)[-1]["step"] + 1
    assert f"{updates} of 60" in (run / "report.html").read_text()

    code, output = train(tmp_path, "run_name=run-0001", **{key: False})
    assert code == 0, output
    assert f"warning: step 52 has loss {value}" in output
    assert "skipped      1 update: loss not finite" in output
    skipped = [row["step"] for row in rows_of(run) if row.get("skipped")]
    assert skipped == [52]
    assert [row["step"] for row in rows_of(run) if "loss" in row] == list(range(60))
    assert all(np.isfinite(array).all() for array in arrays_of(run / "checkpoints/60").values())


@pytest.mark.rest(covered_by="unit/training/test_step.py; unit/training/test_diloco.py")
def test_an_update_that_is_not_finite(tmp_path):
    """Tokens outside of the batch have zero moments. Without epsilon, Adam computes 0 / 0 for them."""
    settings = {"adam_eps": 0, "logits_via_embedding": False, "steps": 3, "checkpoint_period": 1, "eval_interval": -1}
    code, output = train(tmp_path, **settings)
    assert code == 1
    assert "stopped: step 0: loss 4." in output
    assert "are finite, but the update with learning_rate" in output
    assert newest(tmp_path / RUN) is None
    code, output = train(tmp_path, "run_name=run-0001", **settings, abort_on_nan_loss=False, abort_on_inf_loss=False)
    assert code == 1, output
    assert "No checkpoint contains this update" in output
    assert newest(tmp_path / RUN) is None

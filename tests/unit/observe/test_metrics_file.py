"""metrics_file: MaxText's fields; a resumed run appends without losing rows of other runs."""

import contextlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.observe.goodput import Timeline
from trainer.observe.lines import Work, step_fields, step_line
from trainer.observe.metrics import MetricsWriter, read_rows
from trainer.observe.metrics_file import MetricsFile, maxtext_row
from trainer.training.reports import open_reports

WORK = Work(devices=4, tokens=1024, flops_per_token=2e9)
STEP = {
    "step": 7, "loss": 2.5, "lm_loss": 2.0, "z_loss": 0.5, "grad_norm": 3.0, "skipped": 0, "learning_rate": 0.01,
    "tokens": 1000, "step_time": 0.5, "tokens_per_second": 2000.0, "data_wait": 0.0, "decoder/output_mean": [1.0, 2.0],
}  # fmt: skip


def test_a_step_has_maxtexts_names_units_and_floats():
    row = maxtext_row(STEP, WORK, 1.0, "run")
    assert row == {
        "learning/loss": 2.5,
        "learning/lm_loss": 2.0,
        "learning/perplexity": math.exp(2.0),
        "learning/z_loss": 0.5,
        "learning/total_weights": 1000.0,
        "learning/grad_norm": 1.0,
        "learning/raw_grad_norm": 3.0,
        "learning/current_learning_rate": 0.01,
        "perf/step_time_seconds": 0.5,
        "perf/per_device_tflops": 0.512,
        "perf/per_device_tflops_per_sec": 1.024,
        "perf/per_device_tokens": 256.0,
        "perf/per_device_tokens_per_sec": 512.0,
        "step": 7.0,
        "run_name": "run",
    }
    assert all(isinstance(value, float) for name, value in row.items() if name != "run_name")


def test_with_qk_clip_it_has_the_largest_logit():
    row = maxtext_row(STEP | {"max_logit": 31.5, "clipped_heads": 2}, WORK, 1.0, "run")
    assert row["learning/max_logits"] == 31.5
    assert "max_logit: 31.500, " in step_line(STEP | {"max_logit": 31.5}, 10, WORK, "0:00:01")
    fields = step_fields(STEP | {"max_logit": 31.5}, 10, WORK, "0:00:01")
    assert "logit  31.5" in [field.text for field in fields]


def test_with_diloco_it_has_numbers_of_each_island():
    row = maxtext_row(STEP | {"island_losses": [2.0, 3.0]}, WORK, 1.0, "run")
    assert {name: row[name] for name in row if "diloco" in name} == {
        "diloco/island_0_loss": 2.0,
        "diloco/island_1_loss": 3.0,
    }
    synchronized = STEP | {"outer_grad_norm": 0.5, "island_cosine": 0.25, "island_distance": [0.75, 1.5]}
    row = maxtext_row(synchronized, WORK, 1.0, "run")
    assert {name: row[name] for name in row if "diloco" in name} == {
        "diloco/outer_grad_norm": 0.5,
        "diloco/island_cosine": 0.25,
        "diloco/island_0_distance": 0.75,
        "diloco/island_1_distance": 1.5,
    }


@pytest.mark.parametrize(("threshold", "norm", "clipped"), [(0.0, 3.0, 3.0), (5.0, 3.0, 3.0), (1.0, 3.0, 1.0)])
def test_the_norm_after_clipping(threshold, norm, clipped):
    assert maxtext_row(STEP | {"grad_norm": norm}, WORK, threshold, "")["learning/grad_norm"] == clipped
    assert math.isnan(maxtext_row(STEP | {"grad_norm": math.nan}, WORK, threshold, "")["learning/grad_norm"])


def test_an_evaluation():
    row = {"step": 9, "eval_loss": 1.5, "eval_perplexity": 4.5, "eval_tokens": 77, "eval_time": 1.0}
    assert maxtext_row(row, WORK, 1.0, "run") == {
        "eval/avg_loss": 1.5,
        "eval/avg_perplexity": 4.5,
        "eval/total_weights": 77.0,
        "step": 9.0,
        "run_name": "run",
    }


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes the rows of some steps like a process of a run, and returns the messages."""

    def run(steps, name="mine", resumed=False, path=None):
        said = []
        file = MetricsFile(str(path or tmp_path / "metrics.txt"), tmp_path / "run", name)
        with file.open(steps.start, resumed=resumed, say=said.append) as writer:
            for step in steps:
                writer.write(maxtext_row(STEP | {"step": step}, WORK, 1.0, name))
        return said

    return run


def steps_of(path):
    return [(row["run_name"], int(row["step"])) for row in lines(path)]


def test_a_run_that_goes_on_continues_its_rows(tmp_path, write):
    path = tmp_path / "metrics.txt"
    assert write(range(5)) == []
    with path.open("a") as file:
        file.write('{"learning/lo')  # left by a process that was killed while writing
    assert write(range(3, 7), resumed=True) == []
    assert steps_of(path) == [("mine", step) for step in range(7)]
    assert sorted(os.listdir(tmp_path)) == ["metrics.txt"]


@pytest.mark.parametrize(("name", "resumed"), [("mine", False), ("other", False), ("other", True)])
def test_rows_of_another_run_are_kept_beside(tmp_path, write, name, resumed):
    path = tmp_path / "metrics.txt"
    write(range(5))
    before = path.read_bytes()
    (line,) = write(range(2), name, resumed)
    assert line == f"{path} contained metrics of another run; moved to {path}.1"
    assert Path(f"{path}.1").read_bytes() == before
    assert steps_of(path) == [(name, 0), (name, 1)]
    write(range(1), "third")
    assert steps_of(Path(f"{path}.2")) == [(name, 0), (name, 1)]
    assert Path(f"{path}.1").read_bytes() == before


def test_folders_are_made_and_links_are_followed(tmp_path, write):
    (tmp_path / "link").symlink_to(tmp_path / "far" / "metrics.txt")
    write(range(2), path=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert len(lines(tmp_path / "far" / "metrics.txt")) == 2


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("file/below", None, "cannot be written: "),
        ("folder", None, "exists and is not a file"),
        ("/dev/null", None, "exists and is not a file"),
        ("model.py", "import jax\n", "does not contain metrics in this format"),
        ("note", "no line end", "does not contain metrics in this format"),
        ("metrics.jsonl", '{"step": 0, "loss": 1.0}\n', "does not contain metrics in this format"),
        ("bytes", "\0\0", "does not contain metrics in this format"),
        ("run/metrics.jsonl", None, "the run writes that file itself"),
        ("run/../run/config.yml", None, "the run writes that file itself"),
        ("link.jsonl", None, "the run writes that file itself"),
    ],
)
def test_what_cannot_be_written_is_told_before_training(tmp_path, path, content, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "run" / "metrics.jsonl")
    if content is not None:
        (tmp_path / path).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        MetricsFile(str(tmp_path / path), tmp_path / "run", "mine")
    assert str(error.value).startswith(f"metrics_file={tmp_path / path}")
    assert sorted(tmp_path.rglob("*")) == before
    if content is not None:
        assert (tmp_path / path).read_text() == content


@pytest.mark.parametrize(
    ("given", "message"),
    [("gs://bucket/m.txt", "must be a local file; a run in a bucket"), ("a\nb", "without control characters")],
)
def test_a_path_of_no_file_here_is_refused_by_name(given, message):
    with pytest.raises(UserError, match=f"metrics_file=.*{message}"):
        load([f"metrics_file={given}"])


def test_both_files_are_forced_to_disk_every_log_period(tmp_path, monkeypatch):
    config = load(["log_period=3", "ici_fsdp_parallelism=1", "dcn_data_parallelism=1"]).config
    upload, check = lambda: done.append("upload"), lambda look=True: done.append("check") if look else None
    run_dir = SimpleNamespace(path=tmp_path, folder=tmp_path / "mine", upload=upload, check=check, lease=None)
    done = []

    def sync(writer):
        done.append((writer._path.name, len(read_rows(writer._path))))

    monkeypatch.setattr(MetricsWriter, "sync", sync)
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]))
    run = SimpleNamespace(config=config, flops_per_token=1.0, mesh=mesh)
    begin = SimpleNamespace(updates=0, resumed=False)
    console = SimpleNamespace(step=lambda *args: None, evaluation=lambda row: None, say=print, end_bar=lambda: None)
    with contextlib.ExitStack() as stack:
        file = MetricsFile(str(tmp_path / "metrics.txt"), tmp_path / "mine", "mine")
        reports = open_reports(run, run_dir, begin, [file], console, Timeline(), stack)
        for step in range(7):
            reports.step(STEP | {"step": step})
        reports.sync()
        for name in ("metrics.jsonl", "metrics.txt"):  # removed, or replaced by another process
            (tmp_path / name).unlink()
        written = len(done)
        reports.step(STEP | {"step": 7})
        assert done[written:] == ["check", "check"], "before each file is written again"
        del done[written:]
    counts = (3, 6, 7)
    names = ("metrics.jsonl", "metrics.txt")
    assert done == [it for count in counts for it in ("check", *((name, count) for name in names), "upload")]
    assert [row["run_name"] for row in read_rows(tmp_path / "metrics.txt")] == ["mine"] * 8

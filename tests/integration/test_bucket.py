"""Runs whose base_output_directory is a bucket; the fixture `bucket` simulates one."""

import contextlib
import io
import shutil
from pathlib import Path

import pytest
from bucket import FolderBackend, bucket  # noqa: F401, a fixture
from run_cases import command, rows_of
from support import TINY, pinned

from trainer.checkpoint.manager import newest
from trainer.export import main as export
from trainer.observe.console import Console
from trainer.observe.runs import open_run

pytestmark = pytest.mark.rest(covered_by="the storage of its files, in unit/checkpoint/ and unit/observe/")

SETTINGS = TINY | {
    "enable_checkpointing": True,
    "dataset_type": "grain",
    "grain_file_type": "text",
    "tokenizer_type": "bytes",
    "vocab_size": 257,
    "steps": 12,
    "per_device_batch_size": 2,
    "checkpoint_period": 4,
    "max_num_checkpoints_to_keep": 2,
    "eval_interval": 4,
    "eval_steps": 2,
    "prompt": "",
}
RUN = "gs://bucket/runs/run-0001"


def train(*words, base="gs://bucket/runs", **changes):
    """Returns the exit code and the output of a run on one device."""
    return command(SETTINGS | pinned("nnx") | {"base_output_directory": base} | changes, *words)


def checkpoints(run):
    return sorted((path.name for path in (run / "checkpoints").iterdir()), key=int)


@pytest.fixture(scope="module", autouse=True)
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"This is text number {i}. " * 20)
    files = {"grain_train_files": f"{folder}/1?.txt", "grain_eval_files": f"{folder}/?.txt"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in (files | {"data_cache_directory": folder / "cache"}).items():
            patch.setitem(SETTINGS, key, value)
        yield


def test_a_run_in_a_bucket(bucket, tmp_path, monkeypatch):  # noqa: F811
    step = Console.step

    def interrupted(console, row, total):
        if row["step"] == 10:
            raise KeyboardInterrupt
        step(console, row, total)

    monkeypatch.setattr(Console, "step", interrupted)
    code, output = train()
    assert code == 130, output
    assert f"run          {RUN}" in output
    run = bucket / "runs/run-0001"
    assert {path.name for path in run.iterdir()} == {
        "checkpoints",
        "config.yml",
        "goodput.jsonl",
        "metrics.jsonl",
        "report.html",
        "starts.json",
        "tensorboard",
    }
    assert checkpoints(run) == ["4", "8"]
    assert rows_of(run)[-1]["step"] == 7, "copied before the checkpoint that covers them"
    monkeypatch.setattr(Console, "step", step)
    assert train(base=tmp_path / "runs")[0] == 0

    # A machine without local files resumes the run, although a killed process left an incomplete checkpoint.
    shutil.rmtree(tmp_path / "cache" / "trainer")
    shutil.copytree(run / "checkpoints/8", run / "checkpoints/12")
    (run / "checkpoints/12/commit_success.txt").unlink()
    code, output = train()
    assert code == 0, output
    assert f"{RUN} has this configuration and is unfinished: resuming it" in output
    assert f"{RUN}/checkpoints/12 was never committed: removed" in output
    assert f"{RUN}/checkpoints/8: 8 of 12 updates are done" in output
    assert rows_of(run) == rows_of(tmp_path / "runs/run-0001")
    assert checkpoints(run) == ["8", "12"], "what expired is gone"
    assert (run / "finished").exists()
    assert f"{RUN} is finished: nothing to do" in train("run_name=run-0001")[1]

    # Other commands start from the run or convert it.
    code, output = train(load_full_state_path=RUN, steps=14, base=tmp_path / "runs")
    assert code == 0, output
    assert f"starting from {RUN}/checkpoints/12: 12 updates, its optimizer, its position in the data" in output
    code, output = train(load_parameters_path=f"{RUN}/checkpoints/8", steps=1, base=tmp_path / "runs")
    assert code == 0, output
    with contextlib.redirect_stdout(io.StringIO()):
        export([RUN, str(tmp_path / "out"), "format=params"])
    assert {"checkpoint", "config.yml", "tokenizer_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}

    # A file of the newest checkpoint is truncated, then missing.
    file = max((run / "checkpoints/12/state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    name = file.relative_to(run / "checkpoints/12")
    code, output = train("run_name=run-0001", steps=16, learning_rate_schedule_steps=12)
    assert code == 2
    assert f"checkpoint {RUN}/checkpoints/12 is damaged: {name} has " in output
    file.unlink()
    assert f"12 is damaged: {name} cannot be read" in train("run_name=run-0001")[1]


def test_one_process_of_a_machine(bucket):  # noqa: F811
    with open_run("gs://bucket/runs", "mine", "steps: 1", True, print):
        code, output = train("run_name=mine")
    assert code == 2
    assert "run_name=mine: process " in output
    assert " is running in gs://bucket/runs/mine; wait for it" in output
    assert not [path for path in bucket.rglob("*") if path.is_file()], "nothing began"


def test_an_earlier_run_without_checkpoints_is_kept_beside(bucket, tmp_path):  # noqa: F811
    for number in range(3):
        with open_run("gs://bucket/runs", "mine", "enable_checkpointing: false", False, print) as run:
            run.begin("enable_checkpointing: false", {"step": 0}, resumed=False, say=print)
            (run.path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
            run.upload()
        shutil.rmtree(tmp_path / "cache" / "trainer")  # as on another machine
    rows = {path.name: path.read_text() for path in (bucket / "runs/mine").glob("metrics*")}
    names = ("metrics-1.jsonl", "metrics-2.jsonl", "metrics.jsonl")
    assert rows == {name: f'{{"step": {number}}}\n' for number, name in enumerate(names)}
    assert (bucket / "runs/mine/config-2.yml").exists()


def test_a_package_that_is_missing(bucket, monkeypatch):  # noqa: F811
    def exists(self, path):
        raise ImportError("gcsfs")

    monkeypatch.setattr(FolderBackend, "exists", exists)
    code, output = train()
    assert code == 2
    assert "gs://bucket/runs: a package for buckets is missing: pip install 'trainer[gcs]'" in output


def test_what_is_not_in_the_bucket(bucket, tmp_path):  # noqa: F811
    (bucket / "model.safetensors").touch()
    for key in ("load_parameters_path", "load_full_state_path"):
        code, output = train(**{key: "gs://bucket/none"})
        assert code == 2
        assert "gs://bucket/none: no" in output
    assert newest(Path(tmp_path)) is None

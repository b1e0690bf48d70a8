"""Run folders: numbers, names, and what is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer.config import UserError
from trainer.observe import open_run


def test_numbers_count_up(tmp_path):
    base = tmp_path / "a" / "runs"
    assert [open_run(str(base), "").name for _ in range(3)] == ["run-0001", "run-0002", "run-0003"]
    assert all(path.is_dir() and not any(path.iterdir()) for path in base.iterdir())


def test_the_number_after_the_highest(tmp_path):
    for name in ("run-0002", "run-9999", "run-x", "other"):
        (tmp_path / name).mkdir()
    assert open_run(str(tmp_path), "") == tmp_path / "run-10000"


def test_a_number_taken_meanwhile_is_passed_over(tmp_path, monkeypatch):
    for name in ("run-0001", "run-0002"):
        (tmp_path / name).mkdir()
    # Another process made them after this one had looked.
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([]))
    assert open_run(str(tmp_path), "") == tmp_path / "run-0003"


def test_runs_that_begin_at_once_differ(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: open_run(str(tmp_path), "").name, range(32)))
    assert sorted(names) == [f"run-{n:04}" for n in range(1, 33)]


def test_a_given_name(tmp_path):
    assert open_run(str(tmp_path), "mine") == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()


def test_a_folder_without_metrics_may_be_used(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    assert open_run(str(tmp_path), "mine") == tmp_path / "mine"
    assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"


def test_a_run_with_metrics_is_kept(tmp_path):
    for name in ("mine", "mine-2"):
        open_run(str(tmp_path), name)
    (tmp_path / "mine" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError) as error:
        open_run(str(tmp_path), "mine")
    assert str(error.value) == (
        f"run_name=mine: {tmp_path}/mine holds the metrics of an earlier run, which cannot be resumed; "
        "choose another name or leave it empty for the next free number; nearest: mine-3"
    )
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == "{}\n"
    assert not (tmp_path / "mine-3").exists()


@pytest.mark.parametrize("name", ["..", ".", "../other", "a/../../b", "/elsewhere"])
def test_a_name_that_leaves_the_base(tmp_path, name):
    with pytest.raises(UserError, match=f"run_name={name} is no folder within base_output_directory"):
        open_run(str(tmp_path / "runs"), name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["runs"]


def test_a_name_may_have_folders_and_the_base_be_linked(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    open_run(str(tmp_path / "runs"), "sweep/..a")
    assert (tmp_path / "disk" / "sweep" / "..a").is_dir()


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_run("~/runs", "mine") == tmp_path / "runs" / "mine"


@pytest.mark.parametrize("run_name", ["", "mine"])
def test_a_base_that_cannot_be_made(tmp_path, run_name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        open_run(f"{tmp_path}/file/runs", run_name)
    assert str(error.value) == (
        f"base_output_directory={tmp_path}/file/runs: cannot write there (Not a directory); "
        "give a folder that you can write"
    )


def test_a_run_folder_without_permission(tmp_path, monkeypatch):
    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "mine")
    with pytest.raises(
        UserError, match=r"base_output_directory=.* cannot write there \(no permission to write in .*mine"
    ):
        open_run(str(tmp_path), "mine")


def test_a_remote_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="base_output_directory=gs://bucket/runs: remote"):
        open_run("gs://bucket/runs", "")
    assert not any(tmp_path.iterdir())

"""Run folders: numbers, names, which command resumes which run, and refusals."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from run_dir_cases import CONFIG, OPEN, START, START_TEXT, begun, close, finished, opened

from trainer.config.errors import UserError
from trainer.observe.rollouts import RolloutFiles
from trainer.observe.rundir import RunDir
from trainer.observe.starts import read_starts
from trainer.runtime.lease import take


@pytest.fixture(autouse=True)
def closed():
    yield
    close()


def test_numbers_count_up(tmp_path):
    base = tmp_path / "a" / "runs"
    assert [finished(base).name for _ in range(3)] == ["run-0001", "run-0002", "run-0003"]


def test_the_number_after_the_highest(tmp_path):
    for name in ("run-0002", "run-9999", "run-x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    assert opened(tmp_path).path == tmp_path / "run-10000"


def test_a_number_taken_meanwhile_is_passed_over(tmp_path, monkeypatch):
    for name in ("run-0001", "run-0002"):
        (tmp_path / name).mkdir()
    # As if another process had created the folders after this one listed them.
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([]))
    assert opened(tmp_path).path == tmp_path / "run-0003"


@pytest.mark.parametrize("resumes", [False, True])
def test_runs_that_begin_at_once_differ(tmp_path, resumes):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: opened(tmp_path, resumes=resumes), range(32)))
    assert len({run.path for run in runs}) == 32
    assert len({run.path.name for run in runs} & {f"run-{n:04}" for n in range(1, 65)}) == 32


def test_two_processes_at_once_do_not_go_on_with_the_same_run(tmp_path):
    path = begun(tmp_path)
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.path == path
    assert second.path == tmp_path / "run-0002"
    first.lease.close()
    assert opened(tmp_path).path == path


def test_the_newest_unfinished_run_of_the_same_configuration(tmp_path):
    other = CONFIG.replace("20", "30")
    older, _, _ = begun(tmp_path), begun(tmp_path, config=other), finished(tmp_path, config=CONFIG.replace("20", "40"))
    with opened(tmp_path) as held:
        assert held.path == older == tmp_path / "run-0001"
        newer = begun(tmp_path)
        assert newer.name == "run-0004"
    assert opened(tmp_path).path == newer
    lines = []
    assert opened(tmp_path, say=lines.append).path == older, "one that a live process holds is passed over"
    assert lines == [f"{older} has this configuration and is unfinished: resuming it"]


def test_finished_runs_and_those_of_another_configuration_are_passed_over(tmp_path):
    finished(tmp_path)
    begun(tmp_path, config=CONFIG.replace("20", "30"))
    lines = []
    assert opened(tmp_path, say=lines.append).path == tmp_path / "run-0003"
    assert lines == []


def test_a_run_that_goes_on_is_unfinished_until_it_ends_again(tmp_path):
    path = finished(tmp_path, "run-0001")
    run = opened(tmp_path, "run-0001")
    assert run.finished
    run.begin(CONFIG.replace("20", "40"), START, resumed=True, say=lambda line: None)
    assert not run.finished
    assert (path / "config.yml").read_text() == CONFIG.replace("20", "40")
    run.finish()
    assert run.finished


def test_a_folder_in_which_nothing_began_is_taken(tmp_path):
    first = opened(tmp_path)
    assert first.path.name == "run-0001"
    first.lease.close()  # the process ended before the run began
    lines = []
    assert opened(tmp_path, say=lines.append).path == first.path
    assert lines == []


def test_a_folder_with_metrics_whose_configuration_is_gone_is_left_alone(tmp_path):
    (begun(tmp_path) / "config.yml").unlink()
    assert opened(tmp_path).path == tmp_path / "run-0002"


def test_a_configuration_that_is_not_utf8_is_another_one(tmp_path):
    (begun(tmp_path) / "config.yml").write_bytes(b"\xff\xfe")
    assert opened(tmp_path).path == tmp_path / "run-0002"
    path = begun(tmp_path, "mine", resumes=False)
    (path / "config.yml").write_bytes(b"\xff\xfe")
    opened(tmp_path, "mine", resumes=False).begin(CONFIG, START, resumed=False, say=lambda line: None)
    assert (path / "config.yml").read_text() == CONFIG


def test_without_checkpoints_every_run_is_a_new_one(tmp_path):
    begun(tmp_path, resumes=False)
    assert opened(tmp_path, resumes=False).path == tmp_path / "run-0002"


def test_a_given_name(tmp_path):
    path = begun(tmp_path, "mine")
    assert path == tmp_path / "mine"
    assert opened(tmp_path, "mine").path == path, "whatever its state, and whatever the configuration"


def test_a_held_run_refuses_its_name(tmp_path):
    held = opened(tmp_path, "mine")
    with pytest.raises(
        UserError, match=rf"run_name=mine: process {os.getpid()} on .* is running in {tmp_path}/mine; wait for it"
    ):
        opened(tmp_path, "mine")
    held.lease.close()
    opened(tmp_path, "mine").lease.close()


def test_a_run_whose_process_was_killed_is_free(tmp_path):
    code = (
        "import os, signal; from trainer.observe.runs import open_run;"
        f"run = open_run({str(tmp_path)!r}, 'mine', 'steps: 1', True, print); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert opened(tmp_path, "mine").path == tmp_path / "mine"


def test_a_folder_without_metrics_may_be_used(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    assert begun(tmp_path, "mine") == tmp_path / "mine"
    assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"


def test_a_run_with_checkpoints_is_left_alone_where_runs_cannot_go_on(tmp_path):
    for name in ("mine", "mine-2"):
        (begun(tmp_path, name) / "checkpoints/100").mkdir(parents=True)
    with pytest.raises(UserError) as error:
        opened(tmp_path, "mine", resumes=False)
    assert str(error.value) == (
        f"run_name=mine: {tmp_path}/mine holds a run with checkpoints, and enable_checkpointing=false cannot resume "
        "it; choose another name or leave it empty for the next free number; nearest: mine-3"
    )
    assert not (tmp_path / "mine-3").exists()
    (begun(tmp_path, "other") / "checkpoints/trial-0.expired").mkdir(parents=True)  # contains no checkpoint
    assert opened(tmp_path, "other", resumes=False).path == tmp_path / "other"


WITHOUT = CONFIG.replace("true", "false")


def test_a_run_without_checkpoints_given_again_keeps_the_earlier_ones(tmp_path):
    """Earlier runs keep their configurations, finished or not, whatever the new run does."""
    path = begun(tmp_path, "mine", f"{WITHOUT}note: 1\n", resumes=False)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    finished(tmp_path, "mine", f"{WITHOUT}note: 2\n", resumes=False)
    (path / "metrics.jsonl").write_text('{"step": 2}\n')
    lines = []
    opened(tmp_path, "mine").begin(CONFIG, START, resumed=False, say=lines.append)
    assert lines == [
        f"{path} holds an earlier run without checkpoints: its files are kept as metrics-2.jsonl, config-2.yml and "
        "starts-2.json"
    ]
    close()
    assert {file.name: file.read_text() for file in path.iterdir()} == {
        ".lock": "",
        "config.yml": CONFIG,
        **dict.fromkeys(("starts.json", "starts-1.json", "starts-2.json"), START_TEXT),
        "metrics-1.jsonl": '{"step": 1}\n',
        "config-1.yml": f"{WITHOUT}note: 1\n",
        "metrics-2.jsonl": '{"step": 2}\n',
        "config-2.yml": f"{WITHOUT}note: 2\n",
    }


def test_a_name_taken_by_another_file_is_passed_over(tmp_path):
    path = begun(tmp_path, "mine", WITHOUT, resumes=False)
    (path / "config-1.yml").touch()
    opened(tmp_path, "mine", resumes=False).begin(WITHOUT, START, resumed=False, say=print)
    assert (path / "metrics-2.jsonl").exists()
    assert (path / "config-1.yml").read_text() == ""


def test_a_process_killed_while_it_keeps_the_earlier_run_loses_nothing(tmp_path, monkeypatch):
    path = begun(tmp_path, "mine", WITHOUT, resumes=False)
    run = opened(tmp_path, "mine", resumes=False)

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        run.begin("steps: 30\n", START, resumed=False, say=print)
    assert (path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert (path / "config.yml").read_text() == WITHOUT


def test_metrics_that_no_checkpoint_covers(tmp_path):
    """The rows of a run killed before its first checkpoint are written again if the new run saves checkpoints, and kept
    otherwise."""
    path = begun(tmp_path, "killed")
    lines = []
    run = opened(tmp_path, "killed")
    run.begin(CONFIG, START, resumed=False, say=lines.append)
    assert lines == [f"{path} has no checkpoint yet: starting over"]
    run.lease.close()
    opened(tmp_path, "killed", resumes=False).begin(WITHOUT, START, resumed=False, say=lines.append)
    assert lines[1:] == [
        f"{path} holds an earlier run without checkpoints: its files are kept as metrics-1.jsonl, config-1.yml and "
        "starts-1.json"
    ]

    path = finished(tmp_path, "ended")
    before = sorted(path.iterdir())
    with pytest.raises(UserError, match=f"{path} holds the metrics of a finished run whose checkpoints are gone"):
        opened(tmp_path, path.name).begin(CONFIG, START, resumed=False, say=print)
    OPEN.pop().lease.close()
    assert sorted(path.iterdir()) == before
    resumed = opened(tmp_path, "ended")
    resumed.begin(CONFIG, START, resumed=True, say=print)
    assert not resumed.finished


def test_rows_that_are_missing_are_told_where_a_run_goes_on(tmp_path):
    path, lines = begun(tmp_path, "mine"), []
    (path / "metrics.jsonl").write_text('{"step": 0, "loss": 1}\n{"step": 1, "eval_loss": 1}\n')
    run = opened(tmp_path, "mine")
    run.begin(CONFIG, {"step": 1}, resumed=True, say=lines.append)
    assert lines == []
    run.begin(CONFIG, {"step": 3}, resumed=True, say=lines.append)
    assert lines.pop() == f"{path}/metrics.jsonl lacks the rows of 2 earlier steps"
    (path / "metrics.jsonl").unlink()
    run.begin(CONFIG, {"step": 3}, resumed=True, say=lines.append)
    assert lines.pop() == f"{path}/metrics.jsonl is missing, and with it the rows of 3 earlier steps"


@pytest.mark.parametrize("resumed", [False, True])
def test_garbage_in_the_metrics_is_found_before_the_run_begins(tmp_path, resumed):
    path = begun(tmp_path, "mine")
    (path / "metrics.jsonl").write_text('{"step": 0}\ngarbage\n{"step": 1}\n')
    before = {it.name: it.read_bytes() for it in path.iterdir()}
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2 is not a row"):
        opened(tmp_path, "mine").begin(CONFIG, START, resumed=resumed, say=lambda line: None)
    close()
    assert {it.name: it.read_bytes() for it in path.iterdir()} == before


def test_each_start_of_a_run_is_kept_and_the_newest_in_full(tmp_path):
    path = opened(tmp_path, "mine").path
    for step, resumed in ((0, False), (5, True), (5, True)):
        start = {"step": step, "devices": "1 x cpu", "sources": {"steps": "command line"}, "sharding": {"rows": []}}
        OPEN[0].begin(CONFIG, start, resumed=resumed, say=print)
    first, second, third = read_starts(path / "starts.json")
    assert first == {"step": 0, "devices": "1 x cpu"}
    assert second == {"step": 5, "devices": "1 x cpu"}
    assert third == start
    for damaged in ("", "no JSON", "{}", "[1]", '[{"step": "1"}]'):
        (path / "starts.json").write_text(damaged)
        assert read_starts(path / "starts.json") == []
        OPEN[0].begin(CONFIG, START, resumed=True, say=print)
        assert (path / "starts.json").read_text() == START_TEXT


def test_a_run_that_starts_over_has_no_sample_of_the_earlier_one(tmp_path):
    path = begun(tmp_path, "mine")
    (path / "samples.jsonl").write_text('{"step": 20}\n')
    opened(tmp_path, "mine").begin(CONFIG, START, resumed=True, say=print)
    assert (path / "samples.jsonl").exists()
    OPEN[-1].begin(CONFIG, START, resumed=False, say=print)
    assert not (path / "samples.jsonl").exists()


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    path = begun(tmp_path, "mine")
    (path / "rollouts").mkdir()
    left = [path / "starts.json.4999999.tmp", path / "rollouts/000001.jsonl.4999999.tmp"]
    kept = [path / "mine.tmp", path / "rollouts/000000.jsonl"]
    for file in [*left, *kept]:
        file.write_text("{}\n")
    run = opened(tmp_path, "mine")
    run.begin(CONFIG, START, resumed=True, say=print)
    RolloutFiles(run).write(1, [{"reward": 1.0}])
    assert not any(file.exists() for file in left)
    assert all(file.exists() for file in [*kept, path / "rollouts/000001.jsonl"])


def test_a_full_disk(tmp_path, monkeypatch):
    run = opened(tmp_path, "mine")

    def full(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("open", "touch"):
        monkeypatch.setattr(Path, name, full)
    with pytest.raises(UserError, match=r"cannot write .*/mine/config\.yml: No space left on device; free disk space$"):
        run.begin(CONFIG, START, resumed=False, say=print)
    with pytest.raises(UserError, match=r"cannot write .*/mine/finished: No space left on device; free disk space$"):
        run.finish()


def test_config_yml_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = begun(tmp_path)
    run = opened(tmp_path)

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.begin("steps: 30\n", START, resumed=True, say=print)
    assert (path / "config.yml").read_text() == CONFIG


@pytest.mark.parametrize("name", ["..", ".", "../other", "a/../../b", "/elsewhere"])
def test_a_name_that_leaves_the_base(tmp_path, name):
    with pytest.raises(UserError, match=f"run_name={name} is not a folder within base_output_directory"):
        opened(tmp_path / "runs", name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["runs"]


def test_a_name_may_have_folders_and_the_base_be_linked(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    opened(tmp_path / "runs", "sweep/..a")
    assert (tmp_path / "disk" / "sweep" / "..a").is_dir()


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened("~/runs", "mine").path == tmp_path / "runs" / "mine"


@pytest.mark.parametrize("run_name", ["", "mine"])
def test_a_base_that_cannot_be_made(tmp_path, run_name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        opened(tmp_path / "file" / "runs", run_name)
    assert str(error.value) == (
        f"base_output_directory={tmp_path}/file/runs: cannot write there (Not a directory); choose a writable folder"
    )


def test_a_run_folder_without_permission(tmp_path, monkeypatch):
    # Permission is denied by a patch, because root ignores file permissions.
    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainer.runtime.lock.appended", denied)
    with pytest.raises(UserError, match=r"base_output_directory=.* cannot write there \(Permission denied\)"):
        opened(tmp_path, "mine")


def test_a_profile_goes_to_the_bucket_once(tmp_path):
    local, remote = tmp_path / "local", tmp_path / "remote"  # the folder `remote` stands in for a bucket
    name = "tensorboard/plugins/profile/2026/host.xplane.pb"
    (local / name).parent.mkdir(parents=True)
    (local / name).write_bytes(b"trace")
    with (tmp_path / "lock").open("wb") as lock:
        run = RunDir(local, take(tmp_path, lock, print), remote)
        run.upload()
        assert (remote / name).read_bytes() == b"trace"
        (remote / name).write_bytes(b"as it was")
        run.upload()
        run.close()
    assert (remote / name).read_bytes() == b"as it was"

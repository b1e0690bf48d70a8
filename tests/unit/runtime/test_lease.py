"""A run has one owner, on whichever machines its processes are. Another `_place` simulates another machine."""

import json
import os
import subprocess
import sys
import time

import pytest
from bucket import bucket  # noqa: F401, a fixture

from trainer.config.errors import UserError
from trainer.observe.rundir import RunDir
from trainer.observe.runs import expected_run, open_run
from trainer.runtime import lease
from trainer.runtime.lease import is_held, take

HERE = lease._place()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lease, "_RENEWED", 0.05)
    monkeypatch.setattr(lease, "_LOST", 60.0)  # long enough to see a renewal on a slow disk
    monkeypatch.setattr(lease, "_LOOK", 0.02)
    for name in ("TRAINER_JOB", "TRAINER_RESTARTS", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("platform.node", lambda: "here")


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """Yields a function that acquires the run in `tmp_path` for a process on a machine; `said` gets user messages."""
    opened = []

    def take_from(host="here", say=lambda line: None, job=None, restarts=0, renews=True):
        with monkeypatch.context() as patch:
            patch.setattr(lease, "_place", lambda: host)
            patch.setattr("platform.node", lambda: host)
            patch.setattr(lease, "_RENEWED", 0.05 if renews else 1000)
            if job:
                patch.setenv("TRAINER_JOB", job)
                patch.setenv("TRAINER_RESTARTS", str(restarts))
            found = take(tmp_path, (tmp_path / host).open("wb"), say)
        if found:
            opened.append(found)
        return found

    yield take_from
    for each in opened:
        each.close()


def of_file(tmp_path):
    return json.loads((tmp_path / ".lease").read_text())


def test_a_run_on_another_machine_is_refused_until_it_ends(tmp_path, taken):
    said, first = [], taken("there", job="Slurm job 7")
    assert taken(say=said.append, job="Slurm job 8") is None
    assert said == [
        f"{tmp_path} belongs to {lease.owner_of(tmp_path)}; waiting up to 60 s to see whether it still runs"
    ]
    assert lease.owner_of(tmp_path).startswith(f"process {of_file(tmp_path)['pid']} on there, Slurm job 7, since 20")
    first.check()
    first.close()
    assert not (tmp_path / ".lease").exists()
    assert taken() is not None


def test_an_owner_that_renews_no_more_loses_the_run_and_ends(tmp_path, taken, monkeypatch):
    monkeypatch.setattr(lease, "_LOST", 0.2)
    said, first = [], taken("there", renews=False)
    second = taken(say=said.append)
    assert said[1:] == ["it has not renewed its lease for 0 s: this process takes it over"]
    with pytest.raises(UserError, match=rf"{tmp_path}: process \d+ on here, since .* has taken over this run; this"):
        first.check(look=False)
    first.close()
    second.check()
    assert of_file(tmp_path)["host"] == "here", "it took nothing away"


def test_an_owner_learns_of_it_when_it_renews(tmp_path, taken):
    first = taken("there", job="mine")
    assert taken("elsewhere", job="mine") is None, "another process of the same start"
    second, started = taken(job="mine", restarts=1), time.monotonic()
    assert second is not None, "a restart of a job does not wait for its lost host"
    while True:
        try:
            first.check(look=False)
        except UserError:
            break
        assert time.monotonic() - started < 60
        time.sleep(0.01)
    second.check()


def test_who_waits(tmp_path, monkeypatch):
    """A local process that has ended is not waited for. A file that is no lease is waited for like a lease."""
    monkeypatch.setattr(lease, "_LOST", 0.2)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    zombie, waited = subprocess.Popen(["true"]), []
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # PID 1 of a container may never wait for it
    for content in (
        {"id": "a", "place": HERE, "pid": zombie.pid},
        {"id": "a", "place": HERE, "pid": int(ended.stdout)},
        {"id": "a", "place": HERE, "pid": os.getpid()},
        {"id": "a", "place": HERE, "pid": 1},
        {"id": "a", "place": "elsewhere", "pid": int(ended.stdout), "job": ""},
        {"id": "a", "place": HERE, "pid": "1"},
        [],
    ):
        (tmp_path / ".lease").write_text(json.dumps(content))
        said = []
        assert not is_held(tmp_path, said.append)
        waited.append(bool(said))
    zombie.wait()
    assert waited == [False, False, False, True, True, True, True]


def test_the_last_of_two_that_begin_at_once_goes_on(tmp_path, taken, monkeypatch):
    monkeypatch.setattr(lease, "is_held", lambda folder, say: False)  # neither has seen an owner
    first, second = taken("there", renews=False), taken()
    with pytest.raises(UserError, match="has taken over this run"):
        first.check()  # before it writes anything
    second.check()


def test_a_storage_that_fails_for_a_while_ends_nothing(tmp_path, taken, monkeypatch):
    first = taken()

    def fails(*args):
        raise RuntimeError("of a client")

    with monkeypatch.context() as patch:
        patch.setattr(lease, "read_now", fails)
        time.sleep(0.2)
        first.check()
    before, until = of_file(tmp_path)["renewals"], time.monotonic() + 60
    while of_file(tmp_path)["renewals"] == before:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]"])
def test_a_file_that_is_removed_or_damaged_is_written_again(tmp_path, taken, content):
    first, file, until = taken(), tmp_path / ".lease", time.monotonic() + 60
    file.unlink() if content is None else file.write_bytes(content)
    first.check()
    while not file.exists() or b'"pid"' not in file.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.01)
    first.check()


def test_an_owner_that_wakes_after_another_has_come_and_gone_ends(tmp_path, taken, monkeypatch):
    said, first = [], taken("there", say=lambda line: said.append(line), renews=False)
    (tmp_path / ".lease").unlink()
    first.check()
    now = lease._now() + 61
    monkeypatch.setattr(lease, "_now", lambda: now)
    with pytest.raises(UserError, match="its lease was not renewed for 60 s and is gone; this process ends"):
        first.check()
    assert first.lost


def test_an_owner_that_cannot_renew_says_so_once(tmp_path, taken, monkeypatch):
    said = []
    taken(say=said.append)
    began = lease._now()
    monkeypatch.setattr(lease, "_found", lambda file: 1 / 0)
    monkeypatch.setattr(lease, "_now", lambda: began + 31)
    until = time.monotonic() + 60
    while not said:
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.2)
    assert said == [
        f"{tmp_path}/.lease could not be renewed for 30 s; after 60 s a launch on another machine takes over this run"
    ]


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({"TRAINER_JOB": "a", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, ("a", 0)),
        ({"TRAINER_JOB": "a", "TRAINER_RESTARTS": "3"}, ("a", 3)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "3"}, ("Slurm job 7", 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, ("Slurm job 7", 2)),
        ({}, ("", 0)),
    ],
)
def test_the_job(environment, job):
    assert lease._job(environment) == job


def test_a_bucket_between_two_machines(bucket, monkeypatch, tmp_path):  # noqa: F811
    said, args = [], ("gs://bucket/runs", "mine", "steps: 1", True)
    with open_run(*args, print) as first:
        monkeypatch.setattr(lease, "_place", lambda: "there")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
        for begin in (open_run, expected_run):
            with pytest.raises(
                UserError, match=r"run_name=mine: process \d+ on here, since .* is running in gs://buck"
            ):
                begin(*args, said.append)
        with open_run(*args[:1], "", *args[2:], print) as other:
            assert other.folder.name == "run-0001"
        assert len(said) == 2
        first.begin("steps: 1", {"step": 0}, resumed=False, say=print)
        with monkeypatch.context() as patch:
            patch.setattr(lease, "is_held", lambda folder, say: False)
            with open_run(*args, print) as second:
                for write in (first.upload, first.finish):
                    with pytest.raises(UserError, match="has taken over this run"):
                        write()
                second.upload()
    assert not (bucket / "runs/mine/.lease").exists()
    assert not (bucket / "runs/mine/finished").exists()
    monkeypatch.setattr(RunDir, "download", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_run(*args, print)
    assert not (bucket / "runs/mine/.lease").exists(), "a launch that fails owns nothing"

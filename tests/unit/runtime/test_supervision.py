"""A supervised process that hangs is stopped, and its last activity is recorded; all other exits are passed through."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer import train
from trainer.config.load import load
from trainer.observe.goodput import Timeline
from trainer.runtime import supervision
from trainer.runtime.supervision import HANG, supervise

CHILD = """
import os, signal, subprocess, sys, time
from trainer.runtime.supervision import pulse

def stuck():
    time.sleep(600)

def obeys(number, frame):
    sys.exit(143)

sys.platform = "darwin" if "elsewhere" in sys.argv else sys.platform
tell = pulse()
open("pid", "w").write(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignores" in sys.argv else obeys)
how = sys.argv[1]
if how.startswith("code"):
    sys.exit(int(how[4:]))
if how == "leaves":
    print(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid)
    sys.exit(3)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "starts":
    stuck()
print("last words", file=sys.stderr, flush=True)
tell("folder", os.path.abspath("run"))
tell("done", "evaluation")
if how == "grace":
    time.sleep(2.5)
    sys.exit(0)
tell("done", "step 3")
tell("in", "rollouts" if how == "rollouts" else "data")
if how == "rollouts":
    time.sleep(2.5)
    tell("in", "")
    time.sleep(0.3)  # less than the limit of the step, whose time begins again
    sys.exit(0)
if how == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
stuck()
"""
CONFIG = load(["supervise=true", "hang_timeout_seconds=1", "hang_grace_seconds=300"]).config


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervision, "_SECONDS_TO_END", 1.0)
    return lambda *words: supervise("child", words, CONFIG)


def gone(pid):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("words", [("hangs",), ("hangs", "ignores"), ("stopped",)])
def test_a_process_that_hangs(words, child, tmp_path, capfd):
    assert child(*words) == HANG
    assert gone((tmp_path / "pid").read_text())
    (file,) = (tmp_path / "run").glob("hang-*.txt")
    first, *_ = text = file.read_text().splitlines()
    assert first.startswith("nothing was completed for ")
    assert first.endswith(" s (hang_timeout_seconds=1) during step 3 (data)")
    assert text[-1] == "last words"
    stacks = "\n".join(text)
    answers = words != ("stopped",)
    assert ("in stuck" if answers else "does not answer") in stacks
    errors = capfd.readouterr().err
    assert "last words" in errors
    how = "is ended" if answers else "does not answer and is ended"
    assert f"supervise: {first}; the process {how}; stacks and the end of its output are in {file}\n" in errors


@pytest.mark.parametrize(
    ("base", "folder"), [("~/runs", "runs"), ("gs://bucket/runs", "trainer/buckets/gs/bucket/runs")]
)
def test_a_process_that_hangs_before_it_opens_the_folder_of_the_run(base, folder, child, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load(["supervise=true", "hang_grace_seconds=1", f"base_output_directory={base}"]).config
    assert supervise("child", ("starts",), config) == HANG
    (file,) = tmp_path.rglob("hang-*.txt")
    assert file.parent == tmp_path / folder
    assert ("in stuck" in capfd.readouterr().err) == (base != "~/runs"), "a bucket gets no report, so it is printed"


def test_the_folder_is_told_before_the_restore(tmp_path, monkeypatch):
    config = load([f"base_output_directory={tmp_path}", "run_name=seven"]).config
    console, told = SimpleNamespace(say=lambda line: None), []
    monkeypatch.setattr(train, "_opened", lambda *args: (console, SimpleNamespace(config=config), None, None, ""))
    monkeypatch.setattr(train, "_say_what_runs", lambda *args: None)
    monkeypatch.setattr(train, "_train", lambda *args: told.append("the rest"))
    train._run(None, train.TRAIN, Timeline(lambda *line: told.append(line)))
    assert told == [("folder", str(tmp_path / "seven")), "the rest"]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_hang_of_the_file_system_and_a_child_that_sigkill_does_not_end(child, tmp_path, capfd, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *args, **options: answers.wait())
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    monkeypatch.setattr(supervision, "_SECONDS_TO_WRITE", 0.1)
    monkeypatch.setattr(supervision, "_SECONDS_TO_DIE", 0.1)
    assert child("hangs", "ignores") == HANG
    answers.set()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    errors = capfd.readouterr().err
    assert re.search(r"; the process is ended; cannot write .+: its file system does not respond\n", errors)
    assert "in stuck" in errors
    assert errors.endswith("supervise: the process still exists 0 s after SIGKILL\n")


@pytest.mark.parametrize(("how", "code"), [("code0", 0), ("code2", 2), ("killed", 137), ("grace", 0), ("rollouts", 0)])
def test_other_ends_pass_through(how, code, child, tmp_path, capfd):
    assert child(how) == code
    assert ("SIGKILL ended the process during start" in capfd.readouterr().err) == (how == "killed")
    assert not list(tmp_path.glob("run/hang-*"))


def test_what_the_child_leaves_is_ended(child, capfd):
    assert child("leaves") == 3
    assert gone(int(capfd.readouterr().out))


def test_a_pause_of_both_is_no_hang(child, monkeypatch):
    """The supervisor seems to be stopped for 100 s."""
    times = itertools.chain([0.0, 0.0], itertools.count(100.0, 0.1))
    fake = SimpleNamespace(monotonic=lambda: next(times), sleep=time.sleep)
    monkeypatch.setattr(supervision, "time", fake)
    config = load(["supervise=true", "hang_timeout_seconds=1", "hang_grace_seconds=60"]).config
    assert supervise("child", ("code0",), config) == 0


def test_sigterm_is_forwarded(child, tmp_path):
    def when_it_runs():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    supervision_config = load(["supervise=true", "hang_timeout_seconds=300"]).config
    threading.Thread(target=when_it_runs).start()
    assert supervise("child", ("hangs",), supervision_config) == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("words", [["hangs"], ["hangs", "elsewhere"]])
def test_it_dies_with_its_supervisor(words, child, tmp_path):
    code = (
        "from trainer.config.load import load; from trainer.runtime.supervision import supervise\n"
        f"supervise('child', {words}, load(['supervise=true']).config)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until = time.monotonic() + 120
        while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
    assert gone(pid)


def test_a_process_without_supervisor_tells_nobody():
    assert supervision.pulse() is None

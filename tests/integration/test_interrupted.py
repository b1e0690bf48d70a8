"""Processes that are killed or interrupted, and then resumed."""

import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compiler import xla_flags
from process_cases import as_on_a_terminal
from run_cases import RUN, SETTINGS, fault_rounds, rows_of, train
from support import pinned

from trainer.checkpoint.manager import newest
from trainer.data.batches import eval_batches
from trainer.runtime.supervision import HANG

pytestmark = pytest.mark.usefixtures("equal_programs")
# Some tests start processes, others run in this process. All runs are long enough to be interrupted; most of the time
# is start-up and compilation.
LONGER = {"steps": 200, "eval_interval": 100, "checkpoint_period": 100, "dropout_rate": 0.0}
WORDS = [f"{key}={value}" for key, value in (SETTINGS | pinned("nnx") | LONGER).items()]


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))


@pytest.mark.rest(covered_by="SIGTERM, and a save that is killed in unit/checkpoint/")
def test_killed_at_a_random_moment(one_device, tmp_path):
    """scripts/fault_rounds.py runs more rounds; see docs/benchmarks/checkpoints.md."""
    lines = []
    assert fault_rounds.rounds(WORDS, [0], tmp_path, kinds=["kill"], say=lines.append) == 0
    assert len(lines) == 1
    assert "equal in every bit" in lines[0]


@pytest.mark.rest(covered_by="a process that hangs in unit/runtime/test_supervision.py")
def test_data_that_hang_in_one_of_two_processes(one_device, tmp_path):
    """The round checks that its supervisor names the phase, and that both processes end in time and resume."""
    lines = []
    assert fault_rounds.rounds(WORDS, [0], tmp_path, [(2, 2)], ["hang"], lines.append, moments=["batch"]) == 0, lines
    assert re.search(r"equal in every bit, exit 0, named step \d+ \(data\), hang_timeout_seconds=10", lines[0])


def wait_for(text, log, process):
    until = time.monotonic() + 120
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until
        time.sleep(0.01)


def begun(folder, *words):
    command = [sys.executable, "-m", "trainer.train", "base.yml", *WORDS, "run_name=run-0001", *words]
    with as_on_a_terminal(), (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=os.environ)


@pytest.mark.rest(covered_by="processes that hang in unit/runtime/test_supervision.py")
@pytest.mark.skipif(sys.platform != "linux", reason="finds the supervised process in /proc")
def test_a_run_that_hangs_is_ended_and_goes_on(one_device, tmp_path):
    log = tmp_path / "log.txt"
    process = begun(tmp_path, "supervise=true", "hang_timeout_seconds=5", "checkpoint_period=10")
    wait_for("completed step: 21,", log, process)  # the save after update 20 waited for the save after update 10
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGSTOP)
    assert process.wait(120) == HANG, log.read_text()
    assert "supervise: nothing was completed for " in log.read_text()
    (left,) = (tmp_path / RUN).glob("hang-*.txt")
    assert re.search(r"\(hang_timeout_seconds=5\) during (step \d+|save)", left.read_text())
    code, output = train(tmp_path, "run_name=run-0001", **LONGER | {"checkpoint_period": 10, "steps": 200})
    assert code == 0, output
    assert re.search(r"checkpoints/[12]0: [12]0 of 200 updates are done", output)


def interrupted_once(process, log):
    """Sends Ctrl-C to a stopped process, which must die of the signal within seconds, so that shell loops end, too."""
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == -signal.SIGINT, log.read_text()
    assert time.monotonic() - started < 20  # a second or two on an idle machine
    said = log.read_text()
    assert "Ctrl-C: the run saves and ends after this update; Ctrl-C again ends it at once" in said
    end = r"Ctrl-C: saved; the same command continues from here \(runs/run-0001\)\ntime: .* in 1 process\n"
    assert re.search(f"{end}$", said)


def test_ctrl_c_in_training_and_sigterm_in_an_evaluation(one_device, tmp_path, monkeypatch):
    log, run = tmp_path / "log.txt", tmp_path / RUN
    process = begun(tmp_path)
    wait_for("completed step: 12,", log, process)
    process.send_signal(signal.SIGSTOP)  # prevents the process from reaching the evaluation
    code, output = train(tmp_path, "run_name=run-0001", **LONGER)
    assert code == 2
    assert f"run_name=run-0001: process {process.pid} on {platform.node()}, since " in output
    interrupted_once(process, log)
    first = int(newest(run).name)
    assert 12 < first < 100
    assert not (run / "finished").exists()

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return eval_batches(*args, **kwargs)

    with monkeypatch.context() as patch:  # interrupts the first evaluation, after step 99
        patch.setattr("trainer.training.batches.eval_batches", interrupted)
        code, output = train(tmp_path, "run_name=run-0001", **LONGER)
    assert code == 143, output
    assert "SIGTERM: saved; the same command continues from here (runs/run-0001)" in output
    assert newest(run).name == "100"
    assert not any("eval_loss" in row for row in rows_of(run)), "the signal came after the evaluation"

    code, output = train(tmp_path, "run_name=run-0001", **LONGER)
    assert code == 0, output
    assert "checkpoints/100: 100 of 200 updates are done" in output
    (tmp_path / "undisturbed").mkdir()
    code, output = train(tmp_path / "undisturbed", **LONGER)
    assert code == 0, output
    outcomes = [fault_rounds.outcome(folder) for folder in (tmp_path / "undisturbed", tmp_path)]
    assert fault_rounds.differences(*outcomes) == []

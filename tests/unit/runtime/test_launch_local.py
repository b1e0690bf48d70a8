"""scripts/launch_local.py names the process that caused a failure, and restarts a failed job, within limits."""

import importlib.util
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

SCRIPT = Path(__file__).parents[3] / "scripts" / "launch_local.py"
# Process 1 ends as the plan specifies for this start: at a step, with a code; -N means signal N.
PROGRAM = """
import os, signal, subprocess, sys, time
words = dict(word.partition("=")[::2] for word in sys.argv[1:])
index = words["process_id"]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # it does not obey
with open(f"starts-{index}", "a+") as starts:
    starts.write("x")
    starts.seek(0)
    start = len(starts.read())
step, code = words["plan"].split(",")[start - 1].split(":")
if index == "0":
    print(f"completed step: {step}, seconds: 0.1\\n[Gloo] Rank 0 is connected", flush=True)
else:
    while open("shown").read().count("completed") < start:
        time.sleep(0.02)
    with open("pid", "w") as pid:
        pid.write(f"{start} {os.getpid()} ")
sys.stderr.write(f"*** Check failure stack trace: ***\\n    @     0x7f  absl()\\nerror: {index} of {code}\\n")
if code.startswith("left"):
    program = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(program, start_new_session=code == "left apart")
    with open("left", "a") as file:
        file.write(f"{left.pid} ")
elif code == "waits":
    time.sleep(600)
elif index == "1" and int(code) < 0:
    os.kill(os.getpid(), -int(code))
elif index == "1" or code == "0":
    sys.exit(int(code))
else:  # process 0 ends when it has lost process 1, which the launcher has seen to end
    while not os.path.exists("pid") or len(said := open("pid").read().split(" ")) < 3 or int(said[0]) < start:
        time.sleep(0.02)
    while True:
        try:
            os.kill(int(said[1]), 0)
        except ProcessLookupError:
            sys.exit(1)
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def launcher():
    spec = importlib.util.spec_from_file_location("launch_local", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job(launcher, tmp_path, monkeypatch):
    """Yields a function that makes a job of two processes from a plan."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_PAUSE", 0.0)

    shown = (tmp_path / "shown").open("w")

    def make(plan, *options):
        # Process 1 waits for output of process 0. pytest replaces sys.stdout between a fixture and its test.
        monkeypatch.setattr(sys, "stdout", shown)
        words = ["--module", "program", *options, "--", "run_name=r", f"plan={plan}"]
        return launcher._Job(launcher._options(words))

    yield make
    shown.close()


def member(code, **said):
    silent = {"join": lambda seconds: None, "phase": "", "last": "", "reason": "", "lost": False}
    return SimpleNamespace(**{"poll": lambda: code, **silent, **said})


@pytest.mark.parametrize(
    ("codes", "first", "said"),
    [
        ([None, None], None, ""),
        ([0, 0, None], None, ""),
        ([None, -9], 1, "process 1 of 2 was ended by SIGKILL; the others end too"),
        ([1, 1, -9, 1], 2, "process 2 of 4 was ended by SIGKILL"),  # the others lost process 2
        ([-9, -6, -6, None], 0, "process 0 of 4 was ended by SIGKILL"),  # JAX aborts the others when process 0 is gone
        ([1, 137, 134], 1, "process 1 of 3 was ended by SIGKILL"),  # the same under supervisors
        ([-6, None, -6], 1, "process 1 of 3 does not answer: it is stopped, or it hangs; the others end too"),
        ([75, 134, None], 2, "process 2 of 3 does not answer"),
        ([134, 75], 1, "process 1 of 2 ended with code 75"),
        ([2, -6, -6], 0, "process 0 of 3 ended with code 2"),
        ([1, 2], 1, "process 1 of 2 ended with code 2"),  # a user error; process 0 lost process 1
        ([143, 143], 0, ""),  # both processes obeyed a request
        ([143, 75], 1, "process 1 of 2 ended with code 75"),  # the supervisor of process 1 made both processes end
        ([1, 143], 1, ""),
    ],
)
def test_the_first_to_fail(launcher, capsys, codes, first, said):
    assert launcher._first_failure([member(code) for code in codes]) == first
    error = capsys.readouterr().err
    assert said in error
    assert bool(said) == bool(error)


def test_what_the_first_to_fail_did_and_said(launcher, capsys):
    hung = "nothing was completed for 5 s (hang_timeout_seconds=5)"
    silent = member(75, phase="step 4 (data)", reason=f"{hung}; the process does not answer")
    behind, waits = (member(75, phase=f"step {step}", reason=hung) for step in (9, 10))
    waits_too = member(75, phase="step 8", reason=hung, lost=True)
    assert launcher._first_failure([waits, behind, waits_too]) == 1
    assert launcher._first_failure([waits, behind, silent]) == 2
    assert capsys.readouterr().err == (
        f"launch_local: process 1 of 3 ended with code 75 during step 9: {hung}; the others end too\n"
        f"launch_local: process 2 of 3 ended with code 75 during step 4 (data): {silent.reason}; the others end too\n"
    )
    late = member(2, join=lambda seconds: setattr(late, "reason", "error: read at last"))
    launcher._first_failure([late])
    assert "ended with code 2: error: read at last; " in capsys.readouterr().err


def test_the_lines_of_supervisors(launcher):
    line = (
        "supervise: nothing was completed for 5 s (hang_timeout_seconds=5) during step 3 (data); the process {}; stacks"
    )
    match = launcher._SUPERVISED.match(line.format("does not answer and is ended"))
    assert match.groups()[1:] == ("step 3 (data)", "; the process does not answer")
    assert launcher._SUPERVISED.match(line.format("is ended")).groups()[1:] == ("step 3 (data)", None)
    match = launcher._SUPERVISED.match("supervise: SIGKILL ended the process during start\n")
    assert match.groups() == ("SIGKILL ended the process", "start\n", None)


def test_a_stopped_process_is_named_not_the_one_that_lost_it(launcher, capsys, monkeypatch):
    """JAX aborts the processes that lost the stopped process, one after the other."""
    monkeypatch.setattr(launcher, "_GRACE", 0.5)
    monkeypatch.setattr(launcher, "LEFT_TO_END", 1.0)
    programs = ["import os; os.abort()", "import time; time.sleep(60)", "import os, time; time.sleep(0.2); os.abort()"]
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in programs]
    members = [member(0, poll=process.poll, send_signal=process.send_signal) for process in processes]
    assert launcher._Job(launcher._options([]))._wait(members) == 128 + 9
    assert capsys.readouterr().err.startswith("launch_local: process 1 of 3 does not answer")


@pytest.mark.parametrize("grace", [0.0, 5.0])  # whether the hanging process ends after it
def test_a_hang_whose_end_others_obey_first(launcher, capsys, monkeypatch, grace):
    monkeypatch.setattr(launcher, "_GRACE", grace)
    codes = iter([None, None, None, None])
    hung = member(0, poll=lambda: next(codes, 75))
    assert launcher._Job(launcher._options([]))._wait([member(143), hung]) == 75
    assert "process 1 of 2 ended with code 75" in capsys.readouterr().err


def test_a_process_that_sigkill_does_not_end(launcher, capsys, monkeypatch):
    for name in ("_GRACE", "LEFT_TO_END", "_SECONDS_TO_DIE"):
        monkeypatch.setattr(launcher, name, 0.1)
    of_job = {"step": -1, "close": lambda: None}
    blocked = member(None, send_signal=lambda number: None, **of_job)
    assert launcher._Job(launcher._options([]))._wait([member(75), blocked]) == 128 + 9
    said = capsys.readouterr().err
    assert said.startswith("launch_local: process 1 of 2 does not answer")
    job = launcher._Job(launcher._options(["--restarts", "1", "--", "run_name=r"]))
    monkeypatch.setattr(job, "_start", lambda members: members.extend([member(75, **of_job), blocked]))
    assert job.run() == 128 + 9
    assert "not started again: a process still exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "code", "starts", "why"),
    [
        ("3:-9,5:75,6:1,7:0", 0, 4, ""),
        ("0:1,3:1,3:1,1:1", 1, 4, "it failed 3 times without completing a step after step 3"),
        ("0:1,1:1,2:1,3:1,4:9", 9, 5, "all restarts are used"),
        ("0:1,3:2", 2, 2, "exit code 2 is a user's error"),
        ("3:143", 143, 1, ""),
    ],
)
def test_starts_again(job, plan, code, starts, why, tmp_path, capsys):
    assert job(plan, "--restarts", "4").run() == code
    assert (tmp_path / "starts-0").read_text() == (tmp_path / "starts-1").read_text() == "x" * starts
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("launch_local: ")]
    ends, others = (
        [line.removeprefix("launch_local: ") for line in said if ("; the others end too" in line) == named]
        for named in (True, False)
    )
    restarts = [f"restart {i + 1} of 4 in 0 s, from the newest checkpoint" for i in range(starts - 1)]
    assert others == restarts + ([f"not started again: {why}"] if why else [])
    assert len(ends) == starts - (code in (0, 143))
    assert all(end.startswith("process 1 of 2 ") for end in ends)
    if plan.startswith("3:-9"):
        assert ends[0] == (
            'process 1 of 2 was ended by SIGKILL after "completed step: 3, seconds: 0.1"; the others end too'
        )
        assert ends[1].startswith(
            'process 1 of 2 ended with code 75 after "completed step: 5, seconds: 0.1": error: 1 of'
        )


def test_the_pause_doubles_at_a_failure_without_a_new_step(launcher, job, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "_PAUSE", 0.5)
    assert job("0:1,0:1,3:1,4:0", "--restarts", "4").run() == 0
    assert re.findall(r" in (\d) s, from", capsys.readouterr().err) == ["0", "1", "0"]  # 0.5, 1.0, 0.5


def test_nothing_starts_after_a_request_to_end(launcher, job, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launcher, "_PAUSE", 600.0)
    asked = job("3:waits,4:0", "--restarts", "4")

    def ask():
        while not (tmp_path / "pid").exists():  # both processes handle the signal
            time.sleep(0.02)
        asked.requests.append(signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert asked.run() == 1, "the processes did not obey"
    asked = job("0:0,3:1,4:0", "--restarts", "4")
    monkeypatch.setattr(launcher, "_say", lambda text: "restart 1 of" in text and asked.requests.append(signal.SIGTERM))
    assert asked.run() == 143, "in the pause"
    assert "restart" not in capsys.readouterr().err
    assert all(path.read_text() == "xx" for path in tmp_path.glob("starts-*"))


def test_restarts_need_the_name_of_the_run(launcher, capsys):
    for words in (["base.yml"], ["run_name=a", "run_name="]):
        with pytest.raises(SystemExit) as end:
            launcher._options(["--restarts", "1", "--", *words])
        assert end.value.code == 2
        assert "--restarts needs run_name=NAME after --" in capsys.readouterr().err


def test_logs_have_all_output_of_all_starts(job, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/process-1.log").symlink_to("/dev/full")
    assert job("3:1,4:0", "--restarts", "1", "--logs", "logs").run() == 0
    lines = (tmp_path / "logs/process-0.log").read_text().splitlines()
    assert [line.partition(" at ")[0] for line in lines if not line.startswith(("*", " ", "e", "["))] == [
        *("---- started", "completed step: 3, seconds: 0.1", "---- started", "completed step: 4, seconds: 0.1")
    ]
    assert lines.count("*** Check failure stack trace: ***") == 2
    assert "error: 0 of 1" in lines
    said = capsys.readouterr().err
    assert "0x7f" not in said, "a stack in C++ is not shown"
    assert said.count("launch_local: cannot write logs/process-1.log: No space left on device;") == 2, (
        "told once per start"
    )


def test_what_a_process_leaves_is_ended(job, tmp_path):
    assert job("3:left").run() == 0  # the pipes would stay open for 600 s


def test_what_a_process_leaves_in_another_session_keeps_nothing_waiting(launcher, job, monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "_SECONDS_TO_DIE", 0.2)
    assert job("3:left apart", "--logs", "logs").run() == 0
    for pid in (tmp_path / "left").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    log = launcher._Log(tmp_path / "logs", 2)
    log.close()
    log.write("too late")  # by a thread that still reads

"""Reward functions of a user, in worker processes: arguments, results, failures, and how the processes end."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trainer.config.capabilities.chat_keys import functions_problem
from trainer.config.errors import UserError
from trainer.rl import rewards as module
from trainer.rl.rewards import Rewards, Sample, Scored

FUNCTIONS = r'''
import json, os, re, signal, subprocess, sys, time

def length(completions, **kwargs):
    print("x" * 100_000)
    return [float(len(completion)) for completion in completions]

def answers(prompts, completions, answer):
    return [0.1 * (given == right) - len(prompt) / 3 for prompt, given, right in zip(prompts, completions, answer)]

def first_two(p, c, *, answer=None):
    return p == ["a"] and c == ["b"] and answer

def as_told(completions, **columns):
    """Runs the completion in Python."""
    return eval(completions[0], globals(), columns)

def loaded(prompts, completions):
    there = any(name in sys.modules for name in ("jax", "numpy", "yaml", "trainer.config"))
    return there or os.environ["JAX_PLATFORMS"] != "cpu"

def nested(text):
    return json.loads(text)

def positional(prompts, completions, /):
    return 1

def spin():
    """Ends only by a signal that Python does not handle."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    re.match("(a+)+b", "a" * 60)
'''
PATHS = ["my_rewards:length", "my_rewards:answers"]
LATE = 0.75  # seconds; longer than a busy machine needs for a short sample


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("my_rewards", None)


@pytest.fixture(scope="module")
def told(folder):
    """Yields two workers, which score a sample by running its completion."""
    with Rewards(["my_rewards:as_told"], workers=2, seconds=60) as rewards:
        yield rewards


def samples(*completions, prompt="p", **columns):
    return [Sample(prompt, completion, columns, f"x.jsonl, line {i}") for i, completion in enumerate(completions)]


def values(scored):
    return [each.reward for each in scored]


def processes_of(session):
    """Returns the live processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if its == str(session) and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_for_the_end_of(sessions):
    until = time.monotonic() + 20
    while any(map(processes_of, sessions)):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_rewards_are_those_of_the_functions_with_any_number_of_workers(folder):
    import my_rewards

    draw = random.Random(0)
    texts = ["".join(draw.choices("ab\n\0\ud800é", k=draw.randrange(4))) for _ in range(60)]
    batch = [Sample(text, draw.choice(texts), {"answer": draw.choice(texts), "n": 1}, text) for text in texts]
    expected = []
    for prompt, completion, columns, _ in batch:
        each = (
            *my_rewards.length([completion]),
            *my_rewards.answers([prompt], [completion], [columns["answer"]]),
        )
        expected.append(Scored(sum(each), each, False))
    for workers in (1, 2, 3):
        with Rewards(PATHS, workers, seconds=30) as rewards:
            assert rewards(batch) == expected
            assert rewards(batch[:1]) == expected[:1]
            assert rewards([]) == []


def test_what_functions_get(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    paths = [f"my_rewards:{name}" for name in ("first_two", "length", "loaded")]
    with Rewards(paths, 1, 30) as rewards:
        assert rewards([Sample("a", "b", {"answer": 3, "n": 0}, "")]) == [Scored(4.0, (3.0, 1.0, 0.0), False)]
    with Rewards(["my_rewards:positional", "my_rewards:answers"], 1, 30) as rewards:
        assert values(rewards([Sample([{"role": "user"}], "b", {"answer": "b"}, "")]))
        with pytest.raises(
            UserError,
            match=r"answers failed: TypeError: answers\(\) missing .* 'answer'; it can take prompts, completions, n\n",
        ):
            rewards(samples("1", n=2))


@pytest.mark.parametrize(
    ("value", "number"),
    [("2", 2), ("(True,)", 1), ("[x]", 0.1), ("__import__('numpy').ones(1) / 3", 1 / 3)],
)
def test_values(told, value, number):
    assert values(told(samples(value.replace("x", "1e-1")))) == [number]


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "'1'",
        "[1, 2]",
        "[]",
        "[[1]]",
        "[None]",
        "float('nan')",
        "-1e999",
        "1e39",
        "10 ** 400",
        "__import__('numpy').ones(2)",
    ],
)
def test_values_that_are_no_reward(told, value):
    with pytest.raises(UserError, match=r"line 1: the function my_rewards:as_told returned .*finite number"):
        told(samples("1", value, "2", "None"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*my_rewards.py, line 16\)"),
        ("nested('{')", r"JSONDecodeError: .* \(.*my_rewards.py, line 23\)"),
        ("sys.exit('end')", "SystemExit: end"),
        ("\x1b[2J", "SyntaxError"),
    ],
)
def test_exceptions(told, code, said):
    with pytest.raises(UserError, match=rf"^x.jsonl, line 2: the function my_rewards:as_told failed: {said}") as e:
        told(samples("time.sleep(0.1)", "1", code, "1 / 0", "1", prompt="\x1b[1m")[1:])
    assert "\n  prompt: \\x1b[1m\n  completion: " in str(e.value)
    assert "\x1b" not in str(e.value)


def test_the_first_sample_that_failed_is_named(told):
    with pytest.raises(UserError, match=r"line 0: .*RuntimeError"):
        told(samples("time.sleep(0.1) or exec('raise RuntimeError')", "1 / 0", "1 / 0"))
    with pytest.raises(UserError, match=r"line 0: .*twice, with exit code 4"):
        told(samples("time.sleep(0.1) or os._exit(4)", "1 / 0", "1 / 0"))
    assert values(told(samples("1", "2"))) == [1, 2]


def test_workers_go_through_a_set_in_one_order(told):
    assert len(set(values(told(samples(*["time.sleep(0.1) or hash('a')"] * 4))))) == 1


def test_a_sample_that_takes_too_long(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    with Rewards(["my_rewards:length", "my_rewards:as_told"], 2, LATE, said.append) as rewards:
        batch = samples("1", "spin()", "2", "__import__('tempfile').mkdtemp() and time.sleep(60)", "3", "4")
        before = [worker.process.pid for worker in rewards._workers]
        scored = rewards(batch)
        for i in (1, 3):
            length = len(batch[i].completion)
            assert scored[i] == Scored(length, (length, 0.0), True)
        assert [each.by_function[1] for each in scored if not each.timed_out] == [1, 2, 3, 4]
        assert len(said) == 1
        assert "my_rewards:as_told was stopped after 0.75 s" in said[0]
        wait_for_the_end_of(before)  # including the processes that spin() started
        assert values(rewards(samples("5"))) == [6]
        assert len(list(tmp_path.iterdir())) == 2, "a folder of each worker"
    assert not list(tmp_path.iterdir())


def test_a_worker_that_dies(told, tmp_path):
    once = f"os.path.exists({str(tmp_path / 'a')!r}) or (open({str(tmp_path / 'a')!r}, 'w'), os._exit(1))"
    assert values(told(samples("1", once, "2"))) == [1, 1, 2]
    with pytest.raises(UserError, match="line 1: the function my_rewards:as_told ended its process twice, with"):
        told(samples("1", "os._exit(3)", "2", "1 / 0"))
    with pytest.raises(UserError, match="twice, by SIGSEGV"):
        told(samples("os.kill(os.getpid(), signal.SIGSEGV)"))
    idle = [worker.process.pid for worker in told._workers if worker.task == module._IDLE]
    for pid in idle:
        os.kill(pid, signal.SIGKILL)
    assert values(told(samples("1", "2"))) == [1, 2]


def test_signals_are_left_to_the_parent(told):
    code = f"os.kill(os.getpid(), signal.SIG{{}}) or os.getsid(0) != {os.getsid(0)}"
    assert values(told(samples(code.format("INT"), code.format("TERM")))) == [1, 1]
    ends = f"os.waitpid(os.{'fork'}() or [os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)][0], 0)[1]"
    assert values(told(samples(ends))) == [signal.SIGTERM]  # from a process that the reward function starts


@pytest.mark.parametrize(
    ("source", "path", "said"),
    [
        (None, "not_there:f", r"No module named 'not_there'; modules are searched in the current folder, .*PYTHONPATH"),
        ("import not_there", "NAME:f", r"No module named 'not_there' \(.*NAME.py, line 1\)$"),
        ("def f(:", "NAME:f", r"SyntaxError: .*NAME.py, line 1"),
        ("1 / 0", "NAME.f", r"ZeroDivisionError: .*NAME.py, line 1"),
        ("exit(1)", "NAME:f", "SystemExit: 1"),
        ("import os; os._exit(2)", "NAME:f", r"the process that imports it ended with exit code 2"),
        ("def ff(): pass", "NAME:f", r"NAME.py has no function f$"),
        ("def length(): pass", "NAME:lenght", "has no function lenght; nearest: length"),
        ("f = 3", "NAME:f", "has no function f, but f of the type int$"),
        ("import time; time.sleep(60)", "NAME:f", "importing it takes more than 0.4 s"),
    ],
)
def test_functions_that_cannot_be_imported(folder, monkeypatch, request, source, path, said):
    name = f"bad{request.node.callspec.indices['source']}"
    if source:
        (folder / f"{name}.py").write_text(source)
    if "more than" in said:
        monkeypatch.setattr(module, "START_SECONDS", 0.4)
    with pytest.raises(UserError, match=said.replace("NAME", name)):
        Rewards([path.replace("NAME", name)], 1, 1)


def test_all_functions_that_cannot_be_imported_are_named():
    with pytest.raises(UserError, match=r"2 mistakes.*\n  reward_functions=not_there:f: .*\n  .*my_rewards:no: "):
        Rewards(["not_there:f", "my_rewards:length", "my_rewards:no"], 2, 1)


def test_no_process_is_left_when_the_context_ends():
    with Rewards(["my_rewards:as_told"], 2, 30) as rewards:
        sessions = [worker.process.pid for worker in rewards._workers]
        rewards(samples("bool(subprocess.Popen(['sleep', '60']))"))
        assert sum(len(processes_of(session)) for session in sessions) == 3
    wait_for_the_end_of(sessions)


def test_workers_end_with_the_parent(folder):
    code = (
        "from trainer.rl.rewards import Rewards, Sample\n"
        "rewards = Rewards(['my_rewards:as_told'], 2, 60)\n"
        "print(*[worker.process.pid for worker in rewards._workers], flush=True)\n"
        "rewards([Sample('', 'spin()', {}, '')])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        sessions = [int(word) for word in parent.stdout.readline().split()]
        until = time.monotonic() + 20
        while sum(len(processes_of(session)) for session in sessions) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        parent.kill()
    wait_for_the_end_of(sessions)


def test_the_values_of_the_key():
    assert functions_problem(["a.b:f", "a:g", "c.d"]) is None
    assert functions_problem(["a:f", "b", "c d"]) == "not the path of a function, package.module:function: b, c d"
    assert functions_problem(["a:f", "b:f", "a.f"]) == "a.f is given twice"

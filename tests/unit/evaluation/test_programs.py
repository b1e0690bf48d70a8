"""Answers that are programs: correct ones pass; hostile ones neither pass nor do harm."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import tiny_config

from trainer.config.errors import UserError
from trainer.evaluation import programs
from trainer.evaluation.model import Answer, Interrupted
from trainer.evaluation.programs import LIMITS, outcome
from trainer.evaluation.specs import read_specs
from trainer.evaluation.tasks import open_tasks

PROMPT = 'import math\n\ndef shift(x):\n    return x + 1\n\n\ndef total(xs):\n    """The sum."""\n'
TEST = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([shift(0), 0.5]) == 1.5\n"
RIGHT = "    return sum(xs)\n"
PROBLEM = {"task_id": "T/0", "prompt": PROMPT, "entry_point": "total", "canonical_solution": RIGHT, "test": TEST}
LOOP = "    while True: pass\n"
HOSTILE = {
    "    return 3\n": "a test failed",
    "    return str(xs)\n": "a test failed",
    "    return sum(xs\n": "raised SyntaxError",
    "    return names\n": "raised NameError",
    "    pass\nimport os; os._exit(0)\n": "ended its process",
    "    raise SystemExit(0)\n": "raised SystemExit",
    LOOP: "took too long",
    "    class A(int):\n        __eq__ = lambda *_: True\n        __repr__ = lambda _: 'exit(0)'\n    return A()\n": (
        "returned no plain value"
    ),
    "    print('passed' * 9); import builtins; builtins.sum = lambda _: 3; return sum(xs)\n": "a test failed",
    "    import os\n    for i in range(3, 9):\n        try: os.write(i, b'3\\n' * 9)\n        except OSError: pass\n": (
        "a test failed"
    ),
    "    return 'x' * 2_000_000\n": "returned too much",
    "    return len(bytearray(1 << 30))\n": "raised MemoryError",
    "    import socket; socket.create_connection(('127.0.0.1', 9), 1); return sum(xs)\n": "raised OSError",
    "    open('FOLDER/written', 'w'); return sum(xs)\n": "raised OSError",
    "    import os; os.remove('FOLDER/problems'); return sum(xs)\n": "raised OSError",
    "    return int(open('FOLDER/problems').read() or 0)\n": "a test failed",
    "    open('big', 'wb').write(bytes(2 << 20)); return sum(xs)\n": "raised OSError",
    "    import os; os.kill(PARENT, 9); return sum(xs)\n": "raised ProcessLookupError",
    "    import os; os.kill(os.getppid(), 9); os.kill(-1, 9); return 3\n": "raised ProcessLookupError",
    "    import ctypes; return 3 + ctypes.CDLL(None).mount(b'', b'/', b'', 4128, None)\n": "a test failed",
    # Root has no small limit on processes, so this is not a fork bomb, which would slow down other tests.
    "    import os, time\n    for _ in range(30):\n        try:\n"
    "            if not getattr(os, 'fork')(): time.sleep(60)\n"
    "        except OSError: pass\n    return 3\n": "a test failed",
}


@pytest.fixture
def limits(tmp_path):
    (tmp_path / "problems").write_text("3")
    return LIMITS | {"seconds": 1, "memory_mb": 256, "file_mb": 1, "hidden": str(tmp_path / "problems")}


def running():
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"program_child" in _read(path)]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_hostile_programs_neither_pass_nor_harm(tmp_path, limits, monkeypatch):
    assert outcome(PROMPT, RIGHT, TEST, "total", limits | {"seconds": 30}) == "passed"
    found = {}
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        for body, reason in HOSTILE.items():
            some = limits | {"seconds": 1 if reason == "took too long" else 30}
            program = body.replace("FOLDER", str(tmp_path)).replace("PARENT", str(sleeping.pid))
            found[body] = outcome(PROMPT, program, TEST, "total", some)
        assert sleeping.poll() is None
        sleeping.kill()
    assert found == HOSTILE
    assert [path.name for path in tmp_path.iterdir()] == ["problems"]
    # Without namespaces, the limits and the tests are the same. tests/checkout.py refuses to start `python -I`, so the
    # interpreter gets another name.
    link = tmp_path / "interpreter"
    link.symlink_to(sys._base_executable)
    monkeypatch.setattr(sys, "executable", str(link))
    without = limits | {"namespaces": False}
    for body, reason in {RIGHT: "passed", LOOP: "took too long", "    return len(bytearray(1 << 30))\n": None}.items():
        some = without | {"seconds": 1 if body == LOOP else 30}
        assert outcome(PROMPT, body, TEST, "total", some) == (reason or "raised MemoryError")
    deadline = time.monotonic() + 5
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running()


class Model:
    """A model that returns prepared answers."""

    chat, length = None, 512

    def __init__(self, texts, interrupted=False):
        self.texts, self.interrupted, self.asked = texts, interrupted, None

    def prompt(self, text):
        return list(text.encode())

    def answers(self, tokens, limits, until):
        self.asked = [bytes(row).decode() for row in tokens], limits, until
        return [Answer(text, [1], "stop") for text in self.texts]

    def check_goes_on(self):
        if self.interrupted and running():
            raise Interrupted


def test_problems_are_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress((json.dumps(PROBLEM) + "\n").encode() * 3))
    (tmp_path / "p.yml").write_text(
        "kind: programs\nfile: p.jsonl.gz\nseconds: 20\nprompt: '# Python\n\n  {question}'\n"
    )

    def opened(name="p.yml", **keys):
        config = tiny_config("nnx", tokenizer_type="bytes", vocab_size=257, reward_num_workers=1, **keys)
        (task,) = open_tasks(read_specs([name], "tasks"), config, object(), print)
        return task

    with pytest.raises(UserError, match=r"answers run as programs on this machine; eval_tasks_allow_code=true"):
        opened()
    model = Model([RIGHT, "    return 3\n", RIGHT])
    (result,) = opened(eval_tasks_allow_code=True).run(model)
    (score,) = result.scores
    assert (score.metric, score.value, score.samples) == ("pass@1", 2 / 3, 3)
    assert score.error == pytest.approx(1 / 3)
    assert [(row["pass@1"], row["reason"]) for row in result.samples] == [
        (1, "passed"),
        (0, "a test failed"),
        (1, "passed"),
    ]
    prompts, most, until = model.asked
    assert (prompts[0], most[0], until[0]) == (
        f"# Python\n{PROMPT}",
        512,
        ["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
    )
    assert "of 3 programs: 2 passed, 1 a test failed" in capsys.readouterr().out
    # A run that is interrupted does not wait for a program.
    began = time.monotonic()
    with pytest.raises(Interrupted):
        opened(eval_tasks_allow_code=True).run(Model([LOOP] * 3, interrupted=True))
    assert time.monotonic() - began < 10
    monkeypatch.setattr(programs, "_NAMESPACES", ["--no-such"])
    with pytest.raises(UserError, match=r"cannot be run within the limits: .* namespaces: false runs programs without"):
        opened(eval_tasks_allow_code=True)
    for row, said in (
        (PROBLEM | {"test": 3}, "line 1: test: needed: a text"),
        (PROBLEM | {"prompt": "x = ("}, "line 1: prompt: is not a program, even with a body"),
    ):
        (tmp_path / "w.jsonl").write_text(json.dumps(row))
        (tmp_path / "w.yml").write_text("kind: programs\nfile: w.jsonl\n")
        with pytest.raises(UserError, match=said):
            opened("w.yml", eval_tasks_allow_code=True)

"""scripts/launch_local.py names the process that caused the failure."""

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "launch_local.py"


@pytest.fixture(scope="module")
def launcher():
    spec = importlib.util.spec_from_file_location("launch_local", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("codes", "first", "said"),
    [
        ([None, None], None, ""),
        ([0, 0, None], None, ""),
        ([None, -9], 1, "process 1 of 2 was ended by SIGKILL"),
        ([1, 1, -9, 1], 2, "process 2 of 4 was ended by SIGKILL"),  # the others lost it
        ([-9, -6, -6, None], 0, "process 0 of 4 was ended by SIGKILL"),  # JAX aborts the others when the first is gone
        ([-6, None, -6], 1, "process 1 of 3 does not answer: it is stopped, or it hangs; the others end too"),
        ([2, -6, -6], 0, "process 0 of 3 ended with code 2"),
        ([1, 2], 1, "process 1 of 2 ended with code 2"),  # a user error; the other process lost it
        ([143, 143], 0, ""),  # a request that was obeyed
    ],
)
def test_the_first_to_fail(launcher, capsys, codes, first, said):
    assert launcher._first_failure([SimpleNamespace(poll=lambda code=code: code) for code in codes]) == first
    error = capsys.readouterr().err
    assert said in error
    assert bool(said) == bool(error)


def test_a_stopped_process_is_named_not_the_one_that_lost_it(launcher, capsys, monkeypatch):
    """JAX aborts the processes that lost another one after each other."""
    monkeypatch.setattr(launcher, "_GRACE", 0.5)
    monkeypatch.setattr(launcher, "LEFT_TO_END", 1.0)
    programs = ["import os; os.abort()", "import time; time.sleep(60)", "import os, time; time.sleep(0.2); os.abort()"]
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in programs]
    assert launcher._wait(processes) == 128 + 9
    assert capsys.readouterr().err.startswith("launch_local: process 1 of 3 does not answer")


def test_a_stack_in_cpp_is_not_shown(launcher):
    shown = io.StringIO()
    launcher._copy(["F1 lost\n", "*** Check failure stack trace: ***\n", "    @     0x7f  absl()\n"], 0, shown, False)
    assert shown.getvalue() == "F1 lost\n"

"""Tests and the processes that they start import this checkout; see tests/checkout.py."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import checkout
import pytest
from checkout import SRC

import trainer

TESTS = Path(__file__).parents[1]
# Code that starts a process without subprocess.Popen, or changes what the process would import.
AROUND = re.compile(r"os\.(?:system|popen|exec\w*|spawn\w*|posix_spawn\w*|fork)\(|(?:del|set)env\(.PYTHONPATH")
SHOW = "import trainer; print(trainer.__file__)"


def test_this_process_imports_this_checkout():
    assert TESTS.parent / "src" == SRC
    assert Path(trainer.__file__).resolve().is_relative_to(SRC)


@pytest.mark.parametrize("environment", [None, {"XLA_FLAGS": ""}])
def test_another_process_imports_this_checkout(tmp_path, environment):
    """Starts a process in another folder, with this process's environment, unchanged or changed."""
    env = None if environment is None else os.environ | environment
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).resolve() == Path(trainer.__file__).resolve()


@pytest.mark.parametrize("start", [subprocess.run, subprocess.Popen, subprocess.check_output])
def test_a_process_that_could_import_another_copy_is_not_started(start):
    for env in ({}, {"PYTHONPATH": "/elsewhere"}, {"PYTHONPATH": f"/elsewhere{os.pathsep}{SRC}"}):
        with pytest.raises(AssertionError, match="so that it imports this checkout"):
            start([sys.executable, "-c", SHOW], env=env)
    with pytest.raises(AssertionError, match="leave PYTHONPATH out"):
        start([sys.executable, "-I", "-c", SHOW])


def test_a_process_without_python_may_have_any_environment():
    """torch lists the system's libraries when it is imported."""
    assert (
        subprocess.run(["env"], env={"LC_ALL": "C"}, capture_output=True, text=True, check=True).stdout == "LC_ALL=C\n"
    )


def test_another_installed_copy_is_refused(monkeypatch):
    monkeypatch.setattr(trainer, "__file__", "/site-packages/trainer/__init__.py")
    with pytest.raises(pytest.UsageError, match="imported from /site-packages/trainer"):
        checkout.pytest_configure(SimpleNamespace())


def test_no_test_starts_a_process_in_another_way():
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__):
            assert not AROUND.search(path.read_text()), path

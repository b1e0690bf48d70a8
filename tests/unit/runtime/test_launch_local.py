"""scripts/launch_local.py names the process that caused the failure."""

import importlib.util
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

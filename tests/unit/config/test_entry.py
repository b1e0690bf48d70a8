"""How a user's mistake ends a program, and that configuration loads nothing heavy."""

import subprocess
import sys

import pytest

from trainer.config import UserError, exit_on_user_error

PROGRAM = """
import atexit, sys
from trainer.config import exit_on_user_error, load
heavy = ("jax", "flax", "numpy", "optax", "grain", "tensorflow_datasets", "tokenizers")
atexit.register(lambda: print([name for name in heavy if name in sys.modules]))
exit_on_user_error(lambda: load(sys.argv[1:]))()
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, timeout=60)


def test_a_configuration_error_exits_with_2_and_no_traceback_before_jax():
    done = run("stepz=3", "steps=x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 mistakes in the configuration:\n  stepz=3 (command line): ")
    assert "Traceback" not in done.stderr
    assert done.stdout == "[]\n"


def test_help_exits_with_0_before_jax():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m trainer.train")
    assert done.stdout.endswith("[]\n")


def test_other_exceptions_and_results_pass():
    @exit_on_user_error
    def main(error: Exception | None) -> int:
        if error:
            raise error
        return 7

    assert main(None) == 7
    with pytest.raises(ValueError, match="not a user's"):
        main(ValueError("not a user's"))
    with pytest.raises(SystemExit) as caught:
        main(UserError("a user's"))
    assert caught.value.code == 2

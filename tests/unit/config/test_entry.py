"""How a user's error ends a program, and that the configuration imports nothing heavy."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys

import pytest

from trainer.config.errors import UserError, closed_at_interrupt, command_line, exit_on_user_error

PROGRAM = """
import atexit, sys
from trainer.config.errors import exit_on_user_error
from trainer.config.load import load
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


def test_bytes_that_are_not_utf8():
    words = [os.fsdecode(word) for word in (b"steps=3", b"run_name=\xe9t\xe9", "prompt=été".encode(), b"\xff")]
    with pytest.raises(UserError) as error:
        command_line(words)
    assert str(error.value) == (
        "the command line must be UTF-8; these arguments are not:\n  'run_name=\\xe9t\\xe9'\n  '\\xff'"
    )
    with pytest.raises(UserError) as error:
        command_line([os.fsdecode(b"\xff" * 60_000)] + words * 200)
    assert len(str(error.value).splitlines()) < 50
    assert len(str(error.value)) < 10_000
    assert command_line(words[::2]) == ["steps=3", "prompt=été"]


# A process that a script starts in the background ignores Ctrl-C, and so do its children.
AS_ON_A_TERMINAL = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def test_ctrl_c_while_a_command_is_imported_is_the_systems():
    as_a_command = "sys.argv = ['-m']; sys.orig_argv = ['python', '-m', '{}', 'base.yml']\n"  # as set by `python -m`
    code = "import trainer; os.kill(os.getpid(), signal.SIGINT); print('not reached')"
    command = [sys.executable, "-c", AS_ON_A_TERMINAL + as_a_command.format("trainer.train") + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    for other in ("", as_a_command.format("mine.trainer")):  # a command of another package that imports this one
        done = subprocess.run([sys.executable, "-c", AS_ON_A_TERMINAL + other + code], capture_output=True, check=False)
        assert b"KeyboardInterrupt" in done.stderr, "a program that imports the package keeps Python's handler"


IN_A_COMMAND = """
import gc, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from trainer.config.errors import closed_at_interrupt, exit_on_user_error
def interrupt(*of_gc):
    os.kill(os.getpid(), signal.SIGINT)
    [None for _ in range(1000)]
@exit_on_user_error
def main():
    with closed_at_interrupt(lambda: print('closed')):
        {}
        print('not reached')
main()
"""


@pytest.mark.parametrize(
    "where",
    ["interrupt()", "gc.callbacks.append(interrupt); gc.collect()"],  # JAX has such a callback
    ids=["in the code", "in a callback of the garbage collector, which loses exceptions"],
)
def test_ctrl_c_in_a_command_closes_and_ends_it_as_the_system_would(where):
    command = [sys.executable, "-c", IN_A_COMMAND.format(where)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "closed\n", "interrupted\n")


@pytest.fixture
def left_to_the_system():
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("left_to_the_system")
def test_ctrl_c_is_handled_only_while_there_is_something_to_close():
    closed = []

    @exit_on_user_error
    def main():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        with closed_at_interrupt(lambda: closed.append(1)):
            assert callable(signal.getsignal(signal.SIGINT))
            assert not closed
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        raise UserError("x")

    with pytest.raises(SystemExit):
        main()
    assert closed == [1]


@pytest.mark.usefixtures("left_to_the_system")
@pytest.mark.parametrize("command", ["generate", "inspect", "parity", "report", "shardings", "train_compile"])
def test_ctrl_c_ends_a_command_without_anything_to_close_at_once(command, monkeypatch):
    """No matter what the command is doing: an exception would be lost in a callback of the garbage collector."""
    module = importlib.import_module(f"trainer.{command}")
    seen = []
    monkeypatch.setattr(module, "command_line", lambda argv: seen.append(signal.getsignal(signal.SIGINT)) or ["--help"])
    with contextlib.suppress(SystemExit):
        module.main([])
    assert set(seen) == {signal.SIG_DFL}
    assert not {"closed_at_interrupt", "signal"} & vars(module).keys()


@pytest.fixture
def on_a_terminal():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("on_a_terminal")
def test_ctrl_c_stays_with_a_program_that_calls_a_command():
    closed = []

    def interrupted():
        with closed_at_interrupt(lambda: closed.append(1)):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as caught:
        exit_on_user_error(interrupted)()
    assert (caught.value.code, closed) == (130, [1])

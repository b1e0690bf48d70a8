"""SIGTERM as a request to end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from trainer.runtime.preemption import EXIT_CODE, Preemption, ends_at_sigterm


@pytest.fixture(autouse=True)
def restored():
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def test_inside_the_signal_is_a_request():
    with Preemption() as preemption:
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)  # a second one is the same request
        assert preemption.requested
    assert preemption.requested


def test_one_request_is_not_the_next_ones():
    with Preemption() as first:
        os.kill(os.getpid(), signal.SIGTERM)
    with Preemption() as second:
        assert not second.requested
    assert first.requested


def test_the_handler_goes_whatever_ends_the_context():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), Preemption():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_it_ends_the_process():
    code = (
        "import os, signal; from trainer.runtime.preemption import Preemption\n"
        "with Preemption(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('within', flush=True); os.kill(os.getpid(), signal.SIGTERM); print('not reached')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "within\n")


def test_the_exit_code_is_what_a_shell_reports():
    done = subprocess.run(["sh", "-c", "sh -c 'kill -TERM $$'; echo $?"], capture_output=True, text=True, check=True)
    assert int(done.stdout) == EXIT_CODE


def test_a_signal_while_python_is_away_is_told_by_a_thread(monkeypatch, capsys):
    """The main thread is then in a compiler; a wait simulates that."""
    ended, codes = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with ends_at_sigterm("ended while it compiled"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(60)
    assert codes == [EXIT_CODE]
    assert capsys.readouterr().out == "ended while it compiled\n"


def test_no_signal_leaves_nothing_behind(capsys):
    threads = threading.active_count()
    with ends_at_sigterm("not said"):
        pass
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1
    assert capsys.readouterr().out == ""


def test_a_signal_in_a_compilation_ends_it_though_nobody_reads_the_output():
    code = (
        "import os, signal, threading; from trainer.runtime.preemption import ends_at_sigterm\n"
        "with ends_at_sigterm('x'): os.close(1); os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == EXIT_CODE


@pytest.fixture
def sigint_of_the_system():
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL


@pytest.mark.usefixtures("sigint_of_the_system")
def test_ctrl_c_is_an_exception_inside_and_is_not_lost():
    """Python drops the exception if it comes in a callback of its garbage collector."""
    with Preemption() as preemption:
        with contextlib.suppress(KeyboardInterrupt):  # dropped
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            preemption.check(1)


def test_ctrl_c_stays_with_a_program_that_has_a_handler():
    handler = signal.getsignal(signal.SIGINT)
    with Preemption():
        assert signal.getsignal(signal.SIGINT) is handler

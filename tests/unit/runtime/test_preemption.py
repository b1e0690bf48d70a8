"""SIGTERM and Ctrl-C as requests to stop."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from trainer.runtime.preemption import Preemption, ends_at_signals, exit_code


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
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal is the same request
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


class Synchronizes:
    """Simulates JAX's manager: it synchronizes a request at the largest number passed so far, plus one."""

    passed = at = 0

    def request(self):
        self.at = self.passed + 1

    def __call__(self, number):
        self.passed = number
        return number == self.at


@pytest.mark.parametrize(("before", "after"), [([], 125), ([125], 126), ([0, 1, 2], 3)])
def test_several_processes_obey_a_signal_whenever_it_came(before, after, monkeypatch):
    """Including while a run that resumes after 125 updates starts."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    manager = Synchronizes()
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", manager)
    preemption = Preemption()
    assert not any(preemption.check(updates) for updates in before)
    manager.request()
    assert preemption.check(after)
    assert preemption.check(after)
    assert preemption.number == signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
    assert int(done.stdout) == exit_code(signal.SIGTERM)


def test_a_signal_while_python_is_away_is_told_by_a_thread(monkeypatch, capsys):
    """The main thread would be in the compiler; a wait simulates that."""
    ended, codes = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with ends_at_signals("ended while it compiled"):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(60)
    assert codes == [143]
    assert capsys.readouterr().out == "SIGTERM: ended while it compiled\n"


def test_no_signal_leaves_nothing_behind(capsys):
    threads = threading.active_count()
    with ends_at_signals("not said"):
        pass
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_in_a_compilation_ends_it_though_nobody_reads_the_output(name, code):
    """A sleep in C, which the main thread repeats, simulates the compiler."""
    program = (
        "import os, signal; from trainer.runtime.preemption import ends_at_signals\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "import ctypes; libc = ctypes.CDLL(None)\n"
        f"with ends_at_signals('x'): os.close(1); os.kill(os.getpid(), signal.{name}); [libc.sleep(60) for _ in 'ab']"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == code


@pytest.fixture
def sigint_of_the_system():
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL


@pytest.mark.usefixtures("sigint_of_the_system")
@pytest.mark.parametrize(("saves", "how"), [(True, "saves and ends"), (False, "ends without saving")])
def test_the_first_ctrl_c_is_a_request_and_leaves_the_second_to_the_system(saves, how, capfd):
    """The handler raises nothing: Python drops exceptions in garbage-collector callbacks, which JAX has."""
    with Preemption(saves) as preemption:
        signal.raise_signal(signal.SIGINT)
        assert (preemption.requested, preemption.number) == (True, signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.number == signal.SIGINT
    said = capfd.readouterr().err
    assert said.startswith(f"Ctrl-C: the run {how}")
    assert said.count("\n") == 1


@pytest.mark.usefixtures("sigint_of_the_system")
def test_with_several_processes_ctrl_c_reaches_all_as_sigterm(monkeypatch, capfd):
    from jax.experimental import multihost_utils

    told = []
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda update: bool(told))
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))  # simulates JAX's handler
    with Preemption() as preemption:
        assert not preemption.check(1)
        signal.raise_signal(signal.SIGINT)
        assert not preemption.requested, "all processes end after the same update"
        assert preemption.check(2)
    signal.signal(signal.SIGTERM, before)
    assert (told, preemption.number) == ([signal.SIGTERM], signal.SIGINT)


def test_ctrl_c_stays_with_a_program_that_has_a_handler():
    handler = signal.getsignal(signal.SIGINT)
    with Preemption():
        assert signal.getsignal(signal.SIGINT) is handler
    with ends_at_signals("x"):
        assert signal.getsignal(signal.SIGINT) is handler

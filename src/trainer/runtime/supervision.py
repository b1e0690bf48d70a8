"""supervise=true: a small process without JAX runs the training in a child process, and ends the child if it hangs.

The child reports its phase through a pipe. Each line is a keyword and a text:
  done PHASE   the previous phase is complete, and PHASE begins
  in PART      PART of the phase begins; an empty PART: the part has ended
  folder PATH  the run's local folder
"""

import contextlib
import datetime
import faulthandler
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.runtime.signals import die_with, handled
from trainer.runtime.storage import is_remote, mirror

HANG = 75  # the exit code after a hang: EX_TEMPFAIL in sysexits.h
# Phases with the time limit hang_grace_seconds. The limit of other phases (a step, a save, waiting for a batch) is
# hang_timeout_seconds.
LONG = ("start", "restore", "compilation", "evaluation", "rollouts", "end")
START, RESTORE, COMPILATION, EVALUATION, ROLLOUTS, END = LONG
# The child's environment variable with the file descriptors of the pipe and of the file for stacks, and with the
# supervisor's process id.
_VARIABLE = "TRAINER_SUPERVISED"
_STACKS_SIGNAL = signal.SIGUSR2
# Together less than 30: seconds for the stacks, from SIGTERM to SIGKILL, and after SIGKILL.
_SECONDS_FOR_STACKS, _SECONDS_TO_END, _SECONDS_TO_DIE = 5.0, 20.0, 3.0
_SECONDS_TO_WRITE, _POLL = 3.0, 0.5
_SECONDS_OF_POLL = 5.0  # if a poll takes longer, the supervisor was stopped, and probably the child, too
_NO_STACKS = "the process does not answer: it is stopped, or blocked in the kernel"
_KEPT = 64 * 1024  # bytes from the end of the child's stderr that are kept for the report


def pulse() -> Callable[[str, str], None] | None:
    """Returns a function (keyword, text) that sends a line to the supervisor; None if this process is not supervised.

    From this call on, the process dies with its supervisor, and writes the stacks of its threads when it gets
    `_STACKS_SIGNAL`. Call this function once, early.
    """
    if (files := os.environ.pop(_VARIABLE, None)) is None:
        return None
    lines, stacks, parent = map(int, files.split(","))
    die_with(parent)
    faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=True)
    os.set_blocking(lines, False)

    def tell(word: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the supervisor reads slowly or has ended
            os.write(lines, f"{word} {text}\n".encode())

    return tell


def supervise(module: str, words: Sequence[str], config: Config) -> int:
    """Runs `python -m module words` in a child process until it ends, and returns the exit code.

    SIGTERM and Ctrl-C are forwarded to the child. If a phase or part takes longer than hang_timeout_seconds (or
    hang_grace_seconds, if it is in LONG), the child's stacks and the end of its stderr are written to a file. The child
    gets SIGTERM, after which it can still save a checkpoint, and 20 seconds later SIGKILL. This function returns at the
    latest 30 seconds after the limit.

    Returns:
      The child's exit code, 128 + N if signal N ended it, or HANG after a hang.
    """
    received, sent = os.pipe()
    with tempfile.TemporaryFile() as stacks, os.fdopen(received, "rb", buffering=0) as lines:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stderr=subprocess.PIPE,
            pass_fds=(sent, stacks.fileno()),
            env=os.environ | {_VARIABLE: f"{sent},{stacks.fileno()},{os.getpid()}"},
            process_group=0,  # so that the child gets Ctrl-C only once, forwarded by this process
        )
        os.close(sent)
        # Without `with child`, which would wait for the child even if SIGKILL does not end it.
        assert child.stderr is not None
        with child.stderr, _forwarded(child), selectors.DefaultSelector() as selector:
            return _Watched(child, lines, stacks, selector, config).wait()


class _Watched:
    def __init__(
        self,
        child: subprocess.Popen[bytes],
        lines: IO[bytes],
        stacks: IO[bytes],
        selector: selectors.BaseSelector,
        config: Config,
    ):
        self._child, self._stacks, self._selector, self._config = child, stacks, selector, config
        self._phase, self._within, self._since = START, "", time.monotonic()
        base = config.base_output_directory
        self._folder = mirror(base) if is_remote(base) else local_path(base)
        self._stderr, self._rest = bytearray(), b""
        assert child.stderr is not None
        self._selector.register(lines, selectors.EVENT_READ, self._read_lines)
        self._selector.register(child.stderr, selectors.EVENT_READ, self._copy_stderr)

    def wait(self) -> int:
        now = time.monotonic()
        while self._child.poll() is None:
            before = now
            self._read(_POLL)
            now = time.monotonic()
            if now - before > _SECONDS_OF_POLL:
                self._since = min(now, self._since + now - before)
            if now - self._since > self._config[self._key]:
                return self._end()
        self._kill()
        while self._read(0):
            pass
        code = self._child.returncode
        if code < 0 and -code not in (signal.SIGINT, signal.SIGTERM):
            _say(f"{signal.Signals(-code).name} ended the process during {self._what}")
        return code if code >= 0 else 128 - code

    @property
    def _key(self) -> str:
        return "hang_grace_seconds" if (self._within or self._phase) in LONG else "hang_timeout_seconds"

    @property
    def _what(self) -> str:
        return f"{self._phase} ({self._within})" if self._within else self._phase

    def _end(self) -> int:
        passed, limit = time.monotonic() - self._since, f"{self._key}={self._config[self._key]}"
        what = f"nothing was completed for {passed:.0f} s ({limit}) during {self._what}"
        stacks = self._ask_for_stacks()
        how = "is ended" if stacks else "does not answer and is ended"
        file = self._folder / f"hang-{datetime.datetime.now():%Y%m%d-%H%M%S}-{self._child.pid}.txt"
        stderr = self._stderr.decode(errors="replace")
        text = f"{what}\n\n---- stacks of all threads\n{stacks or _NO_STACKS}\n---- end of stderr\n{stderr}"
        self._child.terminate()
        until = time.monotonic() + _SECONDS_TO_END
        written = _written(file, text)
        if is_remote(self._config.base_output_directory) and text not in written:
            written += f"\n{stacks}"  # the file is in a mirror on this machine, which may be lost with it
        _say(f"{what}; the process {how}; {written}")
        while self._child.poll() is None and time.monotonic() < until:
            self._read(_POLL)
        self._kill()
        while self._read(0):
            pass
        try:
            self._child.wait(_SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            _say(f"the process still exists {_SECONDS_TO_DIE:.0f} s after SIGKILL")
        return HANG

    def _kill(self) -> None:
        """Kills the child and the processes of its group, which may still hold the run's lock or the output."""
        with contextlib.suppress(OSError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _ask_for_stacks(self) -> str:
        """Returns the stacks of the child's threads; "" if the child does not answer."""
        self._child.send_signal(_STACKS_SIGNAL)
        size, until = 0, time.monotonic() + _SECONDS_FOR_STACKS
        while time.monotonic() < until:
            self._read(_POLL)
            before, size = size, os.fstat(self._stacks.fileno()).st_size
            if size and size == before:
                self._stacks.seek(0)
                return self._stacks.read().decode(errors="replace")
        return ""

    def _read(self, timeout: float) -> bool:
        """Processes the child's output, waiting for it at most `timeout` seconds. Returns whether a pipe was ready."""
        if not self._selector.get_map():  # the child has closed both pipes
            time.sleep(timeout)
        ready = self._selector.select(timeout) if self._selector.get_map() else []
        for key, _ in ready:
            if data := os.read(key.fd, _KEPT):
                key.data(data)
            else:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _read_lines(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, _, text = line.decode(errors="replace").partition(" ")
            if word == "done":
                self._phase, self._within, self._since = text, "", time.monotonic()
            elif word == "in":  # the time limit starts anew with each part, and with the rest of the phase after it
                self._within, self._since = text, time.monotonic()
            elif word == "folder":
                self._folder = Path(text)

    def _copy_stderr(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(data)
            sys.stderr.flush()
        self._stderr = (self._stderr + data)[-_KEPT:]


def _written(file: Path, text: str) -> str:
    """Writes `text` to `file`, in a thread because the file system may hang, too. Returns where the text is."""
    problem = "its file system does not respond"

    def write() -> None:
        nonlocal problem
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            problem = ""
        except OSError as error:
            problem = error.strerror or str(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_SECONDS_TO_WRITE)
    return f"cannot write {file}: {problem}\n{text}" if problem else f"stacks and the end of its output are in {file}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"supervise: {text}", file=sys.stderr, flush=True)


def _forwarded(child: subprocess.Popen[bytes]) -> contextlib.AbstractContextManager[None]:
    """A context that forwards SIGTERM and Ctrl-C from this process to the child."""
    return handled((signal.SIGTERM, signal.SIGINT), lambda number, frame: child.send_signal(number))

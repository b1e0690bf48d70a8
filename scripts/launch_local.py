"""Starts a run with several processes on this machine. They communicate over loopback, as they would on a cluster.

    python scripts/launch_local.py -n 4 -- base.yml steps=100
    python scripts/launch_local.py -n 2 --devices 4 -- base.yml ici_fsdp_parallelism=8
    python scripts/launch_local.py -n 2 --restarts 5 --logs logs -- base.yml run_name=seven
    python scripts/launch_local.py --module trainer.generate -- runs/run-0001 prompt="def "

Everything after -- is passed to `python -m trainer.train`, or to the module that --module names. The output of process
0 is shown unchanged; with --all, the output of every process is shown with its number. stderr of the other processes is
always shown. --logs also writes all output of process N to FOLDER/process-N.log. --devices gives each process this many
CPU devices instead of the machine's devices.

When a process ends with an error or no longer responds, the launcher reports the process, what it was doing, and its
error; ends the others; and exits with the code of the failed process. With --restarts N, it restarts all processes at
most N times: after 1 second, or after 2 seconds if no new step was completed since the last restart. It does not
restart them after a user's error (exit code 2), after a request to end, or after three failures at the same step, which
it reads from the output of process 0. SIGTERM and Ctrl-C are passed to all processes, and nothing is started after
them.
"""

import argparse
import contextlib
import datetime
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

HEARTBEAT = 10  # seconds without a heartbeat after which processes count as dead
_GRACE = 5.0  # seconds within which all processes end after losing contact with the same process
LEFT_TO_END = 20.0  # seconds that the other processes have to end by themselves after one has ended with an error
_SECONDS_TO_READ = 1.0  # maximum wait for the last output of a process that has ended
_SECONDS_TO_DIE, _SECONDS_TO_CLOSE = 30.0, 5.0  # maximum wait after SIGKILL: for a process; for the end of its output
_POLL = 0.05
_USER_ERROR, _HANG = 2, 75  # exit codes; 75: `trainer.runtime.supervision.HANG`
_ABORTED = (
    -signal.SIGABRT,
    128 + signal.SIGABRT,
)  # aborted by JAX; which code depends on whether there is a supervisor
_LOST = {*_ABORTED, _HANG}  # exit codes of processes that have waited for another process in vain
_OBEYED = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT)  # exit codes of processes that ended on request
_SIGNALS = {int(number) for number in signal.Signals}
_SAME_STEP = 3  # successive failures without a new step after which nothing is restarted
_PAUSE = 1.0  # seconds before a restart; doubled at each failure without a new step
# Lines that begin with these texts are not shown: output of JAX's collectives when they connect, and the C++ stack
# trace when JAX aborts a process that has lost contact with another.
_NOISE = ("[Gloo] Rank", "*** Check failure stack trace", "    @     0x")
_COUNT = "--xla_force_host_platform_device_count"
_STEP = re.compile(r"completed step: (\d+),")
_REASON = re.compile(r"(error|stopped): |[\w.]+(Error|Exception)\b")
_SUPERVISED = re.compile(r"supervise: (.+?) during ([^;]+)(; the process does not answer)?")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if all processes succeeded, otherwise the code of the process that failed first."""
    job = _Job(_options(argv))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: job.requests.append(number))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is closed
        signal.signal(signal.SIGHUP, lambda number, frame: job.requests.append(signal.SIGTERM))
    return job.run()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, help="CPU devices of each process")
    parser.add_argument("--module", default="trainer.train", help="module to run; default: %(default)s")
    parser.add_argument("--all", action="store_true", help="show the output of every process")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for the output of each process")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="maximum restarts of a failed job")
    parser.add_argument("words", nargs="*", metavar="-- base.yml key=value", help="arguments of the module")
    options = parser.parse_args(argv)
    if options.processes < 1 or (options.devices is not None and options.devices < 1) or options.restarts < 0:
        parser.error("--processes and --devices must be at least 1, and --restarts at least 0")
    names = [word for word in options.words if word.startswith("run_name=")]
    if options.restarts and (not names or names[-1] == "run_name="):
        parser.error("--restarts needs run_name=NAME after --, because a restart must continue the same run")
    try:
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--logs {options.logs}: cannot be created ({error.strerror}); choose a writable folder")
    return options


class _Member:
    """One of the processes, with the information from its output so far.

    Attributes:
      step: the last completed step; -1: none.
      last: the last line of stdout, shortened.
      phase: what the process was doing when its supervisor ended it; "": unknown.
      reason: why it ended; "": unknown.
      lost: whether it reported that another process ended.
    """

    def __init__(self, index: int, command: Sequence[str], environment: dict[str, str], options: argparse.Namespace):
        self.step, self.last, self.phase, self.reason, self.lost = -1, "", "", "", False
        self._prefix, self._log = f"[{index}] " if index or options.all else "", _Log(options.logs, index)
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C reaches the process only once, through this launcher
        )  # fmt: skip
        self.poll, self.send_signal = self._process.poll, self._process.send_signal
        self._readers = [
            threading.Thread(target=self._copy, args=pair, daemon=True)
            for pair in (
                (self._process.stdout, sys.stdout if options.all or index == 0 else None, self._read_stdout),
                (self._process.stderr, sys.stderr, self._read_stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def join(self, seconds: float) -> None:
        """Waits until all output is read; at most `seconds` for each of stdout and stderr."""
        for reader in self._readers:
            reader.join(seconds)

    def close(self) -> None:
        """Kills the processes that the ended process left behind, which may hold the run's lock, and reads the rest of
        its output. Processes in another session survive, and their later output is not logged."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.join(_SECONDS_TO_CLOSE)
        self._log.close()

    def _copy(self, stream: IO[str], shown: IO[str] | None, read: Callable[[str], None]) -> None:
        with stream:
            for line in stream:
                self._log.write(line)
                if line.startswith(_NOISE):
                    continue
                read(line.strip())
                if shown is not None:
                    shown.write(self._prefix + line)
                    shown.flush()

    def _read_stdout(self, line: str) -> None:
        self.last = (line if len(line) <= 60 else f"{line[:57]}...") or self.last
        if match := _STEP.match(line):
            self.step = int(match[1])

    def _read_stderr(self, line: str) -> None:
        if match := _SUPERVISED.match(line):
            self.reason, self.phase = match[1] + (match[3] or ""), match[2]
        elif _REASON.match(line):
            self.lost = self.lost or "another process of this run ended" in line
            self.reason = self.reason if self.phase else line[:200].rstrip(":")  # the supervisor's reason has priority


class _Log:
    """The file FOLDER/process-N.log, to which starts and output lines are appended unbuffered. Without a folder,
    nothing is written."""

    def __init__(self, folder: Path | None, index: int):
        self._path = folder and folder / f"process-{index}.log"
        self._file: IO[bytes] | None = None
        self._failed = False
        if self._path:
            with self._told():
                self._file = self._path.open("ab", buffering=0)
        self.write(f"---- started at {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n")

    def write(self, line: str) -> None:
        with self._told(), contextlib.suppress(ValueError):  # a reader may still run after `close`
            if self._file and not self._failed:
                self._file.write(line.encode())

    def close(self) -> None:
        if self._file:
            self._file.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Reports an OSError, after which nothing more is logged. The error must not end the reader of the pipe,
        because a full pipe would stop the run."""
        try:
            yield
        except OSError as error:
            self._failed = True
            _say(f"cannot write {self._path}: {error.strerror}; the output of this start is no longer logged")


class _Job:
    """The processes of a run, with all restarts.

    Attributes:
      requests: the signals to send to all processes. After the first signal, nothing is started.
    """

    def __init__(self, options: argparse.Namespace):
        self.requests: list[int] = []
        self._options, self._sent = options, 0
        self._environment = dict(os.environ)
        if options.devices:
            self._environment["JAX_PLATFORMS"] = "cpu"
            flags = [flag for flag in self._environment.get("XLA_FLAGS", "").split() if _COUNT not in flag]
            self._environment["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT}={options.devices}"])

    def run(self) -> int:
        """Runs the job. Returns the exit code, as `main` does."""
        best, failures, restarts = -1, 0, self._options.restarts
        for restart in range(restarts + 1):
            members: list[_Member] = []
            try:
                self._start(members)
                code = self._wait(members)
            finally:
                for member in members:
                    member.close()
            if any(member.poll() is None for member in members):
                _say(f"not started again: a process still exists {_SECONDS_TO_DIE:.0f} s after SIGKILL")
                break
            if not (restarts and code) or code in _OBEYED or self.requests:
                break
            failures = failures + 1 if members[0].step <= best else 1
            best = max(best, members[0].step)
            if why := _why_not(code, failures, best, restart == restarts):
                _say(f"not started again: {why}")
                break
            pause = _PAUSE * 2 ** (failures - 1)
            _say(f"restart {restart + 1} of {restarts} in {pause:.0f} s, from the newest checkpoint")
            until = time.monotonic() + pause
            while time.monotonic() < until and not self.requests:
                time.sleep(_POLL)
            if self.requests:
                return 128 + self.requests[0]
        return code

    def _start(self, members: list[_Member]) -> None:
        options, address = self._options, f"127.0.0.1:{_free_port()}"
        keys = [
            f"coordinator_address={address}", f"num_processes={options.processes}",
            f"jax_distributed_heartbeat_timeout_seconds={HEARTBEAT}",
        ]  # fmt: skip
        for index in range(options.processes):
            command = [sys.executable, "-m", options.module, *options.words, *keys, f"process_id={index}"]
            members.append(_Member(index, command, self._environment, options))

    def _wait(self, members: Sequence[_Member]) -> int:
        """Waits for all processes. If one fails, names it and ends the processes that do not end by themselves. Returns
        the exit code of the job."""
        failed, since = None, 0.0
        while any(member.poll() is None for member in members):
            for number in self.requests[self._sent :]:
                _send(members, number)
                self._sent += 1
            if failed is None and (codes := {code for member in members if (code := member.poll())}):
                since = since or time.monotonic()
                if not codes <= {*_LOST, *_OBEYED} or time.monotonic() - since > _GRACE:
                    failed = _first_failure(members)
            elif since and time.monotonic() - since > LEFT_TO_END:
                _send(members, signal.SIGKILL)
                if time.monotonic() - since > LEFT_TO_END + _SECONDS_TO_DIE:
                    break
            time.sleep(_POLL)
        if failed is None or (members[failed].poll() in _OBEYED and not self.requests):  # a hang may have ended later
            failed = _first_failure(members)
        if failed is None:
            return 0
        code = members[failed].poll() or -signal.SIGKILL
        return code if code > 0 else 128 - code


def _why_not(code: int, failures: int, step: int, last: bool) -> str:
    """Returns why a failed job is not restarted; "": it is restarted. `failures`: the number of successive failures in
    which no step after `step` was completed. `last`: whether no restart is left."""
    if code == _USER_ERROR:
        return "exit code 2 is a user's error"
    if failures == _SAME_STEP:
        return f"it failed {failures} times without completing {f'a step after step {step}' if step >= 0 else 'a step'}"
    return "all restarts are used" if last else ""


def _first_failure(members: Sequence[_Member]) -> int | None:
    """Returns the index of the process that failed, and names the process on stderr unless it obeyed a request to end.
    Returns None if no process failed.

    If several processes failed, returns the likeliest cause. The other processes lose contact with that process; then
    they end with code 1, or JAX aborts them, or their supervisors end them. If all processes that ended have lost
    another one, the cause is a process that still runs.
    """
    codes = {index: code for index, member in enumerate(members) if (code := member.poll())}
    if not codes:
        return None
    for index in codes:
        members[index].join(_SECONDS_TO_READ)
    index = min(codes, key=lambda index: _rank(codes[index], members[index]))
    code, member = codes[index], members[index]
    number = -code if code < 0 else code - 128
    how = f"was ended by {signal.Signals(number).name}" if number in _SIGNALS else f"ended with code {code}"
    running = [index for index, member in enumerate(members) if member.poll() is None]
    if code in _LOST and running:
        index, how = running[0], "does not answer: it is stopped, or it hangs"
    if code not in _OBEYED:
        member = members[index]
        phase = f" during {member.phase}" if member.phase else f' after "{members[0].last}"' if members[0].last else ""
        reason = f": {member.reason}" if member.reason and number not in _SIGNALS else ""
        _say(f"process {index} of {len(members)} {how}{phase}{reason}; the others end too")
    return index


def _rank(code: int, member: _Member) -> tuple[bool | float, ...]:
    """Returns a sort key: the likelier it is that the process caused the failure, the smaller the key. Among hanging
    processes, the one at the lowest step is the likeliest. The SIGTERM that a hanging process gets from its supervisor
    reaches all processes, so a process that obeyed is less likely than a hanging one."""
    step, obeyed = re.search(r"step (\d+)", member.phase), code in (*_OBEYED, -signal.SIGTERM)
    return (
        *(code in _ABORTED, member.lost, code > 0 or obeyed, 0.5 - _HANG if obeyed else -code),
        *("does not answer" not in member.reason, int(step[1]) if step else math.inf),
    )


def _send(members: Sequence[_Member], number: int) -> None:
    for member in members:
        if member.poll() is None:
            member.send_signal(number)


def _say(text: str) -> None:
    print(f"launch_local: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())

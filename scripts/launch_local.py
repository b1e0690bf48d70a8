"""Starts a run as several processes on this machine, like on a cluster, over loopback.

    python scripts/launch_local.py -n 4 -- base.yml steps=100
    python scripts/launch_local.py -n 2 --devices 4 -- base.yml ici_fsdp_parallelism=8
    python scripts/launch_local.py --module trainer.generate -- runs/run-0001 prompt="def "

Everything after -- is passed to `python -m trainer.train`, or to the module of --module. Output of process 0 is shown
unchanged; with --all, output of every process is shown with its number. stderr of the other processes is always shown.
--devices gives each process this many CPU devices instead of the machine's devices. When a process ends with an error,
or no longer answers, the launcher names it, ends the others, and exits with its code. SIGTERM and Ctrl-C are passed to
all processes.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

HEARTBEAT = 10  # seconds without a heartbeat after which processes count as dead
_GRACE = 5.0  # seconds in which JAX aborts all processes that lost the same other
LEFT_TO_END = 20.0  # seconds that the other processes have to end by themselves after one has ended with an error
_POLL = 0.05
# Output of JAX's collectives when they connect, and the stack in C++ where JAX aborts a process that lost another.
_NOISE = ("[Gloo] Rank", "*** Check failure stack trace", "    @     0x")
_COUNT = "--xla_force_host_platform_device_count"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if all processes succeeded, otherwise that of the process that failed first."""
    options = _options(argv)
    environment = dict(os.environ)
    if options.devices:
        environment["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if _COUNT not in flag]
        environment["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT}={options.devices}"])
    address = f"127.0.0.1:{_free_port()}"
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-m", options.module, *options.words, f"coordinator_address={address}",
                f"num_processes={options.processes}", f"process_id={index}",
                f"jax_distributed_heartbeat_timeout_seconds={HEARTBEAT}",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C reaches them once, through this launcher
        )
        for index in range(options.processes)
    ]  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: _send(processes, number))
    readers = [
        threading.Thread(target=_copy, args=(stream, index, shown, options.all))
        for index, process in enumerate(processes)
        for stream, shown in (
            (process.stdout, sys.stdout if options.all or index == 0 else None),
            (process.stderr, sys.stderr),
        )
    ]
    for reader in readers:
        reader.start()
    code = _wait(processes)
    for reader in readers:
        reader.join()
    return code


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, help="CPU devices of each process")
    parser.add_argument("--module", default="trainer.train", help="what runs; default: %(default)s")
    parser.add_argument("--all", action="store_true", help="show the output of every process")
    parser.add_argument("words", nargs="*", metavar="-- base.yml key=value", help="the command line of the module")
    options = parser.parse_args(argv)
    if options.processes < 1 or (options.devices is not None and options.devices < 1):
        parser.error("at least one process with at least one device")
    return options


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Waits for all processes. If one fails, names it and ends the processes that do not end by themselves."""
    failed, since = None, 0.0
    while any(process.poll() is None for process in processes):
        if failed is None and (codes := {code for process in processes if (code := process.poll())}):
            since = since or time.monotonic()
            if codes != {-signal.SIGABRT} or time.monotonic() - since > _GRACE:
                failed = _first_failure(processes)
        elif since and time.monotonic() - since > LEFT_TO_END:
            _send(processes, signal.SIGKILL)
        time.sleep(_POLL)
    failed = _first_failure(processes) if failed is None else failed
    if failed is None:
        return 0
    code = processes[failed].returncode
    return code if code > 0 else 128 - code


def _first_failure(processes: Sequence[subprocess.Popen]) -> int | None:
    """Returns the process that failed, and names it on stderr unless it obeyed a request to end.

    If several failed, returns the likeliest cause: the others lose it and end with code 1, or JAX aborts them. If JAX
    aborted all that ended, the cause is a process that still runs.
    """
    codes = {index: code for index, process in enumerate(processes) if (code := process.poll())}
    if not codes:
        return None
    index = min(codes, key=lambda index: (codes[index] == -signal.SIGABRT, codes[index] > 0, -codes[index]))
    code = codes[index]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    running = [index for index, process in enumerate(processes) if process.poll() is None]
    if code == -signal.SIGABRT and running:
        index, how = running[0], "does not answer: it is stopped, or it hangs"
    if code not in (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT):
        print(
            f"launch_local: process {index} of {len(processes)} {how}; the others end too", file=sys.stderr, flush=True
        )
    return index


def _send(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _copy(stream: IO[str], index: int, shown: IO[str] | None, prefixed: bool) -> None:
    for line in stream:
        if shown is not None and not line.startswith(_NOISE):
            shown.write(f"[{index}] {line}" if prefixed or index else line)
            shown.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())

"""Starts a run as several processes on this machine, as a cluster would, over loopback.

    python scripts/launch_local.py -n 4 -- base.yml steps=100
    python scripts/launch_local.py -n 2 --devices 4 -- base.yml ici_fsdp_parallelism=8

Everything behind -- goes to `python -m trainer.train`. Lines of process 0 are shown as they are, or with --all those of
each, with its number before them; what another one says on stderr is always shown. --devices gives each of them that
many CPU devices in place of what the machine has. When one ends with an error, it is named, the others are ended, and
its code is the launcher's. SIGTERM and Ctrl-C go to all.
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

HEARTBEAT = 10  # seconds without a sign of life after which processes give each other up
LEFT_TO_END = 20.0  # seconds that the others have to end by themselves, once one has ended with an error
_POLL = 0.05
_COUNT = "--xla_force_host_platform_device_count"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where all processes ended well, else that of the one that failed first."""
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
                sys.executable, "-m", "trainer.train", *options.words, f"coordinator_address={address}",
                f"num_processes={options.processes}", f"process_id={index}",
                f"jax_distributed_heartbeat_timeout_seconds={HEARTBEAT}",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C reaches them from here, once
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
    parser.add_argument("--all", action="store_true", help="show the output of every process")
    parser.add_argument("words", nargs="*", metavar="-- base.yml key=value", help="the command line of trainer.train")
    options = parser.parse_args(argv)
    if options.processes < 1 or (options.devices is not None and options.devices < 1):
        parser.error("at least one process with at least one device")
    return options


def _wait(processes: Sequence[subprocess.Popen]) -> int:
    """Waits for all; once one has failed, names it and ends those that do not follow it."""
    failed, since = None, 0.0
    while any(process.poll() is None for process in processes):
        if failed is None:
            failed = _first_failure(processes)
            since = time.monotonic()
        elif time.monotonic() - since > LEFT_TO_END:
            _send(processes, signal.SIGKILL)
        time.sleep(_POLL)
    failed = _first_failure(processes) if failed is None else failed
    if failed is None:
        return 0
    code = processes[failed].returncode
    return code if code > 0 else 128 - code


def _first_failure(processes: Sequence[subprocess.Popen]) -> int | None:
    """The process that failed, named on stderr, unless it met a request. Of several the likeliest cause of the others:
    they lose it, and end with code 1, or are aborted by JAX where it was the first process."""
    codes = {index: code for index, process in enumerate(processes) if (code := process.poll())}
    if not codes:
        return None
    index = min(codes, key=lambda index: (codes[index] == -signal.SIGABRT, codes[index] > 0, -codes[index]))
    code = codes[index]
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if code not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
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
        if shown is not None and not line.startswith("[Gloo] Rank"):  # what JAX's collectives say as they connect
            shown.write(f"[{index}] {line}" if prefixed or index else line)
            shown.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())

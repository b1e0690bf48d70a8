"""The lease of a run: a file in its folder says which process owns it, to processes of all machines.

On one machine the lock decides (`lock`): the system frees it when its process ends. A bucket has no locks, and those of
many network file systems reach no other machine. So the owner also writes who it is into the file, and renews it with
a counter.

No two clocks are compared: whoever finds the lease of a process elsewhere reads it until it changes, and takes it if it
does not within `_LOST` seconds of its own clock. The times of files would decide at once, but may come from the clock
of another client or from a cache. It takes the lease at once of an owner of the same job, and of one with a number that
no process has here any more.

Neither folders nor buckets have a write that fails if the file has changed. The last writer owns the run. Each reads
the file again before it first writes into the folder, at each renewal, every log_period updates and before each
checkpoint, and ends if it is another's. Two processes thus write at once only if one of them stood still between its
reading and its writing for longer than the start of the other, or for `_LOST` seconds, and until its next look: for
at most `_RENEWED` seconds and an update. Neither saves a checkpoint meanwhile without a look, but one whose saving has
begun is completed.
"""

import contextlib
import datetime
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from trainer.config.errors import UserError
from trainer.config.json_files import parsed
from trainer.runtime.folders import lives, replace_file
from trainer.runtime.storage import is_remote, read_now

LEASE_FILE = ".lease"
_RENEWED, _LOST, _LOOK = 15.0, 60.0, 1.0  # seconds between renewals, until a lease is lost, between looks at another's
_BYTES = 10_000
_ANY = Exception  # what clients of buckets raise; a file that cannot be read or written now takes no lease away


class Lease:
    """A run that this process owns, from `take` to `close`. A thread renews the file."""

    def __init__(self, folder: Any, lock: IO[bytes], owner: Mapping[str, Any]):
        """Writes the file. Raises OSError if that is not possible. `lock`: of the folder, closed with the lease."""
        self._file, self._lock, self._owner, self._renewals = folder / LEASE_FILE, lock, owner, 0
        self._using, self._ended, self._other = threading.Lock(), threading.Event(), ""
        self._write()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self, look: bool = True) -> None:
        """Raises UserError if another process has taken the run, as the file says now, or at the last `look`."""
        if look:
            with self._using, contextlib.suppress(_ANY):
                self._look()
        if self._other:
            raise UserError(
                f"{self._file.parent}: {self._other}; this process ends, and what it has not saved is lost. Give each "
                "command that runs at the same time its own run_name"
            )

    def close(self) -> None:
        """Gives up the lease and the lock."""
        self._ended.set()
        with self._using, contextlib.suppress(_ANY):
            if _found(self._file).get("id") == self._owner["id"]:
                self._file.unlink()
        self._lock.close()

    def _renew(self) -> None:
        while not (self._ended.wait(_RENEWED) or self._other):
            with self._using, contextlib.suppress(_ANY):
                self._look()
                if not (self._other or self._ended.is_set()):
                    self._write()

    def _look(self) -> None:
        found = _found(self._file)
        if found.get("id") != self._owner["id"]:
            self._other = f"{_said(found)} has taken over this run" if found else f"{LEASE_FILE} was removed from it"

    def _write(self) -> None:
        self._renewals += 1
        data = json.dumps({**self._owner, "renewals": self._renewals}).encode()
        if is_remote(self._file):
            self._file.write_bytes(data)
        else:
            replace_file(self._file, data)


def take(folder: Any, lock: IO[bytes], say: Callable[[str], None]) -> Lease | None:
    """Takes the lease of the run in `folder`; None if its owner lives. Waits for up to 60 s to find out, with a line.

    Args:
      lock: of the folder, which this process holds. It is closed with the lease, or here if there is none.

    Raises:
      OSError: the file cannot be read or written.
    """
    lease = None
    try:
        if not is_held(folder, say):
            lease = Lease(folder, lock, _owner())
    finally:
        if lease is None:
            lock.close()
    return lease


def is_held(folder: Any, say: Callable[[str], None]) -> bool:
    """Returns whether the owner of the run in `folder` lives, and is not of the same job. See `take`."""
    file, me = folder / LEASE_FILE, _owner()
    found = _found(file)
    if not found or (me["job"] and found.get("job") == me["job"]):
        return False
    if found.get("place") == me["place"] and isinstance(found.get("pid"), int) and not lives(found["pid"]):
        return False
    say(f"{folder} belongs to {_said(found)}; waiting up to {_LOST:.0f} s to see whether it still runs")
    since = time.monotonic()
    while (now := _found(file)) == found:
        if time.monotonic() - since > _LOST:
            say(f"it has not renewed its lease for {_LOST:.0f} s: this process takes it over")
            return False
        time.sleep(_LOOK)
    return bool(now)


def owner_of(folder: Any) -> str:
    """Returns who owns the run in `folder`, for messages."""
    return _said(_found(folder / LEASE_FILE))


def _owner() -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "host": platform.node(),
        "place": _place(),
        "pid": os.getpid(),
        "job": _job(os.environ),
        "since": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _place() -> str:
    """Returns what is the same for all processes here. Elsewhere, a process's number is another process's: on another
    machine, whatever its name, and in another container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _job(environ: Mapping[str, str]) -> str:
    """Returns what a launch and its restarts have in common; "" if the environment does not say."""
    if environ.get("TRAINER_JOB"):
        return environ["TRAINER_JOB"]
    if environ.get("SLURM_JOB_ID"):
        return f"Slurm job {environ['SLURM_JOB_ID']}"
    host, index = platform.node(), f"-{environ.get('JOB_COMPLETION_INDEX')}"
    return f"Kubernetes job {host.removesuffix(index)}" if host.endswith(index) else ""


def _found(file: Any) -> dict[str, Any]:
    """Returns what is in the file; {} if there is none."""
    try:
        data = read_now(file, _BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    with contextlib.suppress(ValueError):
        if isinstance(found := parsed(data), dict) and found:
            return found
    return {"id": repr(data)}  # written by something else, or cut: whoever it is, a lease that does not change is lost


def _said(found: Mapping[str, Any]) -> str:
    if "pid" not in found:
        return "another process"
    job = f", {found['job']}" if found.get("job") else ""
    return f"process {found['pid']} on {found.get('host')}{job}, since {found.get('since')}"

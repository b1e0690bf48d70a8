"""The lease of a run: a file in the run's folder that tells all machines which process owns the run.

On one machine, a file lock suffices (module `lock`): the system releases the lock when the owner ends. But buckets have
no locks, and the locks of many network file systems do not reach other machines. So the owner also writes its identity
and a counter to the lease file, and renews the lease by incrementing the counter.

The clocks of two machines are never compared. A process that finds another machine's lease polls it. If the lease does
not change for `_LOST` seconds on the polling process's clock, that process takes the lease. The age of the lease file
would show without polling whether the lease is still renewed, but the file's modification time may come from another
machine's clock or from a cache. A process takes a lease immediately, without polling, if the lease is from an earlier
start of the same job, or if its owner ran on this machine and has ended.

Folders and buckets have no conditional write in common, so the last process that writes the lease file owns the run.
The owner rereads the file before it first writes to the folder, at each renewal, every log_period updates, before each
checkpoint and just before the checkpoint's commit. If the file names another process, the rereading process has lost
the run, and ends. Two processes can act as owners at the same time only if one of them pauses between reading and
writing the file. Then the process that has lost the run ends at most one update after its next attempt to renew its
lease.
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
_RENEWED, _LOST, _LOOK = 15.0, 60.0, 1.0  # seconds: renewal interval, lifetime of an unrenewed lease, poll interval
_BYTES = 10_000  # the maximum size of the file
_ANY = Exception  # bucket clients raise errors of any type; one failed read or write does not end a lease


class Lease:
    """This process's ownership of a run, from `take` to `close`. A thread renews the lease file."""

    def __init__(self, folder: Any, lock: IO[bytes], owner: Mapping[str, Any], say: Callable[[str], None]):
        """Writes the lease file. Raises OSError if that fails. `lock`: the folder's lock, released with the lease."""
        self._file, self._lock, self._owner, self._renewals = folder / LEASE_FILE, lock, owner, 0
        self._using, self._ended, self._other = threading.Lock(), threading.Event(), ""
        self._say, self._written, self._looked, self._warned = say, 0.0, _now(), False
        self._write()
        threading.Thread(target=self._renew, args=(_RENEWED,), daemon=True).start()

    def check(self, look: bool = True) -> None:
        """Raises UserError if another process has taken over the run. Rereads the lease file first if `look` is true,
        or if the thread has missed a renewal, as on a host that was frozen."""
        if look or _now() - self._looked > 2 * _RENEWED:
            with self._using, contextlib.suppress(_ANY):
                self._look()
        if self._other:
            raise UserError(
                f"{self._file.parent}: {self._other}; this process ends, and its unsaved progress is lost. Give each "
                "concurrent command a different run_name"
            )

    @property
    def lost(self) -> bool:
        """Whether another process had taken over the run when the lease file was last read."""
        return bool(self._other)

    def close(self) -> None:
        """Releases the lease and the lock."""
        self._ended.set()
        with self._using, contextlib.suppress(_ANY):
            if _found(self._file).get("id") == self._owner["id"]:
                self._file.unlink()
        self._lock.close()

    def _renew(self, seconds: float) -> None:
        while not (self._ended.wait(seconds) or self._other):
            with self._using, contextlib.suppress(_ANY):
                self._look()
                if not (self._other or self._ended.is_set()):
                    self._write()
            late = _now() - self._written > _LOST / 2
            if late and not self._warned:
                self._say(
                    f"{self._file} could not be renewed for {_LOST / 2:.0f} s; after {_LOST:.0f} s a launch on another "
                    "machine takes over this run"
                )
            self._warned = late

    def _look(self) -> None:
        self._looked = _now()
        found = _found(self._file)
        if "pid" in found and found.get("id") != self._owner["id"]:
            self._other = f"{_said(found)} has taken over this run"
        elif not found and _now() - self._written > _LOST:  # another process may have owned the run and ended meanwhile
            self._other = f"its lease was not renewed for {_LOST:.0f} s and is gone"

    def _write(self) -> None:
        self._renewals += 1
        data = json.dumps({**self._owner, "renewals": self._renewals}).encode()
        if is_remote(self._file):
            self._file.write_bytes(data)
        else:
            replace_file(self._file, data)
        self._written = _now()


def take(folder: Any, lock: IO[bytes], say: Callable[[str], None]) -> Lease | None:
    """Takes the lease of the run in `folder`; returns None if another process owns the run and is alive. To check
    whether that process is alive, this function may wait up to 60 s.

    Args:
      lock: the folder's lock, held by this process. It is released with the lease, or immediately if None is returned.
      say: gets messages about waiting and failed renewals.

    Raises:
      OSError: the file cannot be read or written.
    """
    lease = None
    try:
        if not is_held(folder, say):
            lease = Lease(folder, lock, _owner(), say)
    finally:
        if lease is None:
            lock.close()
    return lease


def is_held(folder: Any, say: Callable[[str], None]) -> bool:
    """Returns whether another process owns the run in `folder` and is alive. May wait up to 60 s to check whether that
    process is alive.

    An earlier start of this process's job does not count as an owner.
    """
    file, me = folder / LEASE_FILE, _owner()
    found = _found(file)
    if not found or (me["job"] and me["job"] == found.get("job") and me["start"] > found.get("start", 0)):
        return False
    pid = found.get("pid")  # the owner's; if equal to ours, the owner has ended, as after a container's restart
    if found.get("place") == me["place"] and isinstance(pid, int) and (pid == me["pid"] or not lives(pid)):
        return False
    say(f"{folder} belongs to {_said(found)}; waiting up to {_LOST:.0f} s to see whether it still runs")
    since, missing = time.monotonic(), 0
    while time.monotonic() - since < _LOST:
        time.sleep(_LOOK)
        with contextlib.suppress(_ANY):
            now = _found(file)
            if now and now != found:
                return True
            missing = 0 if now else missing + 1
            if missing > 1:  # a rewrite of the file may make it disappear for a moment
                return False
    say(f"it has not renewed its lease for {_LOST:.0f} s: this process takes it over")
    return False


def owner_of(folder: Any) -> str:
    """Returns a description of the owner of the run in `folder`, for messages."""
    return _said(_found(folder / LEASE_FILE))


def _owner() -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "host": platform.node(),
        "place": _place(),
        "pid": os.getpid(),
        **dict(zip(("job", "start"), _job(os.environ), strict=True)),
        "since": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }


def _place() -> str:
    """Returns an identifier of this machine and container, within which process ids are unique. Host names would not
    suffice, because machines may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _job(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the name of the job, which is the same for a launch and its restarts, and the number of the job's earlier
    starts.

    Returns ("", 0) if the environment names no job.
    """
    if environ.get("TRAINER_JOB"):
        name, starts = environ["TRAINER_JOB"], environ.get("TRAINER_RESTARTS", "")
    elif environ.get("SLURM_JOB_ID"):
        name, starts = f"Slurm job {environ['SLURM_JOB_ID']}", environ.get("SLURM_RESTART_COUNT", "")
    else:
        return "", 0
    return name, int(starts) if starts.isdecimal() else 0


def _now() -> float:
    """Returns the time in seconds, from a clock that also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def _found(file: Any) -> dict[str, Any]:
    """Returns the content of the lease file; {} if it does not exist."""
    try:
        data = read_now(file, _BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    with contextlib.suppress(ValueError):
        if isinstance(found := parsed(data), dict) and found:
            return found
    return {"id": repr(data)}  # invalid or truncated; it still counts as a lease until it stops changing


def _said(found: Mapping[str, Any]) -> str:
    if "pid" not in found:
        return "another process"
    job = f", {found['job']}" if found.get("job") else ""
    return f"process {found['pid']} on {found.get('host')}{job}, since {found.get('since')}"

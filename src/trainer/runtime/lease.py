"""The lease of a run: a file in the run's folder identifies the process that owns the run, for all machines.

On one machine the lock decides (`lock`): the system releases it when its process ends. Buckets have no locks, and locks
of many network file systems do not reach other machines. So the owner also writes its identity to the file, and renews
it with a counter.

The clocks of two machines are never compared. A launch that finds another machine's lease polls the lease until it
changes, and takes it if it stays the same for `_LOST` seconds on the launch's clock. File times would decide at once,
but they may come from another client's clock or from a cache. A lease is taken at once from an earlier start of the
same job, and from an owner on this machine that has ended.

Neither folders nor buckets support a write that fails if the file has changed. The last writer owns the run. Each owner
reads the file again before it first writes into the folder, at each renewal, every log_period updates, before each
checkpoint and just before its commit, and ends if the file names another process. Two owners can write for a short time
only if one of them pauses between reading and writing; this lasts until one update after its next renewal.
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
_RENEWED, _LOST, _LOOK = 15.0, 60.0, 1.0  # seconds between renewals, until a lease is lost, between polls
_BYTES = 10_000
_ANY = Exception  # bucket clients raise exceptions of any type; a lease survives a failed read or write of the file


class Lease:
    """A run that this process owns, from `take` to `close`. A thread renews the file."""

    def __init__(self, folder: Any, lock: IO[bytes], owner: Mapping[str, Any], say: Callable[[str], None]):
        """Writes the file. Raises OSError if this is not possible. `lock`: the folder's, closed with the lease."""
        self._file, self._lock, self._owner, self._renewals = folder / LEASE_FILE, lock, owner, 0
        self._using, self._ended, self._other = threading.Lock(), threading.Event(), ""
        self._say, self._written, self._warned = say, 0.0, False
        self._write()
        threading.Thread(target=self._renew, args=(_RENEWED,), daemon=True).start()

    def check(self, look: bool = True) -> None:
        """Raises UserError if another process has taken the run, according to the file now or at the last `look`."""
        if look:
            with self._using, contextlib.suppress(_ANY):
                self._look()
        if self._other:
            raise UserError(
                f"{self._file.parent}: {self._other}; this process ends, and what it has not saved is lost. Give each "
                "command that runs at the same time its own run_name"
            )

    @property
    def lost(self) -> bool:
        """Whether another process has taken the run, as far as this process knows."""
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
        found = _found(self._file)
        if "pid" in found and found.get("id") != self._owner["id"]:
            self._other = f"{_said(found)} has taken over this run"
        elif not found and _now() - self._written > _LOST:  # another process may have run and ended in that time
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
    """Takes the lease of the run in `folder`; None if its owner lives. May wait up to 60 s to find out; reports this.

    Args:
      lock: the folder's lock, which this process holds. It is closed with the lease; without a lease, at once.

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
    """Returns whether the owner of the run in `folder` lives, other than as an earlier start of the job; see `take`."""
    file, me = folder / LEASE_FILE, _owner()
    found = _found(file)
    if not found or (me["job"] and me["job"] == found.get("job") and me["start"] > found.get("start", 0)):
        return False
    pid = found.get("pid")  # equal to ours: an earlier process in a restarted container
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
            if missing > 1:  # missing once: perhaps between two writes
                return False
    say(f"it has not renewed its lease for {_LOST:.0f} s: this process takes it over")
    return False


def owner_of(folder: Any) -> str:
    """Returns who owns the run in `folder`, for messages."""
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
    """Returns an identifier of this machine and container. Process ids are comparable only within one place: machines
    may have the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _job(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the job's name, which a launch and its restarts share, and the number of earlier starts; ("", 0) if the
    environment has neither."""
    if environ.get("TRAINER_JOB"):
        name, starts = environ["TRAINER_JOB"], environ.get("TRAINER_RESTARTS", "")
    elif environ.get("SLURM_JOB_ID"):
        name, starts = f"Slurm job {environ['SLURM_JOB_ID']}", environ.get("SLURM_RESTART_COUNT", "")
    else:
        return "", 0
    return name, int(starts) if starts.isdecimal() else 0


def _now() -> float:
    """Returns the time in seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def _found(file: Any) -> dict[str, Any]:
    """Returns the content of the file; {} if there is none."""
    try:
        data = read_now(file, _BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    with contextlib.suppress(ValueError):
        if isinstance(found := parsed(data), dict) and found:
            return found
    return {"id": repr(data)}  # unknown writer, or truncated: a lease that does not change is lost in any case


def _said(found: Mapping[str, Any]) -> str:
    if "pid" not in found:
        return "another process"
    job = f", {found['job']}" if found.get("job") else ""
    return f"process {found['pid']} on {found.get('host')}{job}, since {found.get('since')}"

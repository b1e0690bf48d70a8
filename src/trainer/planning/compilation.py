"""Compiles a configuration with `trainer.train_compile` in a separate process, and returns a row for the journal."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.aot.report import DOES_NOT_FIT
from trainer.config.dump import to_yaml
from trainer.config.environment import PREFIX
from trainer.config.keys import Config
from trainer.observe.text import short_time, si
from trainer.planning.candidate import FAILED, FITS, TOO_LARGE, kept
from trainer.training.memory import host_memory

# Settings that keep train_compile from writing files.
_WRITES = {"compiled_trainstep_file": "", "compile_report_file": "", "dump_hlo": False}
# The limits of a compilation are these multiples of the largest memory and of the longest time of earlier compilations;
# the time limit is at least _LEAST_SECONDS.
_MORE_MEMORY, _MORE_TIME, _LEAST_SECONDS = 3, 10, 1800
_POLL = 0.2  # seconds
# train_compile in a process that dies with this one. Its first argument is the id of this process.
_TRAIN_COMPILE = """
import gc, sys
from trainer.runtime.signals import die_with
die_with(int(sys.argv.pop(1)))
gc.disable()
from trainer.train_compile import main
main()
"""


class Compiler:
    """Runs compilations one after the other, each in a separate process with limits on memory and time."""

    def __init__(self, program: Sequence[str] = ()):
        """`program`: the command that compiles, up to the configuration file, which is its next argument. Default:
        `trainer.train_compile`, in a process that dies with this one."""
        self._program = program or (sys.executable, "-c", _TRAIN_COMPILE, str(os.getpid()))
        self._memory, self._seconds = 0, 0.0  # the maxima over the compilations that succeeded so far
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def __call__(self, config: Config) -> dict[str, Any]:
        """Compiles a configuration, and returns the row for the journal, except for its item `key`.

        The row has `outcome`, `reason`, `report`, `wall_seconds`, `memory` (the compiler's peak, in bytes), and
        `again`, which is true if a limit or a signal ended the compilation, so that another attempt may succeed.

        Args:
          config: not resolved.
        """
        began = time.monotonic()
        self._folder = tempfile.mkdtemp(prefix="trainer-plan-")
        try:
            limit, memory = self._run(config, Path(self._folder), began)
            assert self._process is not None
            seconds, code = round(time.monotonic() - began, 1), self._process.returncode
            row = {"wall_seconds": seconds, "memory": memory, "again": bool(limit) or code < 0}
            report = Path(self._folder) / "report.json"
            if not limit and code in (0, DOES_NOT_FIT) and report.exists():
                self._memory, self._seconds = max(self._memory, memory), max(self._seconds, seconds)
                outcome = FITS if code == 0 else TOO_LARGE
                return row | {"outcome": outcome, "reason": "", "report": kept(json.loads(report.read_text()))}
            output = (Path(self._folder) / "output").read_text(errors="replace")
            return row | {"outcome": FAILED, "reason": limit or _reason(code, output), "report": {}}
        finally:
            self.end()

    def end(self) -> None:
        """Ends a running compilation, and removes its files."""
        if self._process and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, config: Config, folder: Path, began: float) -> tuple[str, int]:
        """Runs the process. Returns the limit that it exceeded ("" if none), and its peak memory in bytes."""
        point = folder / "config.yml"
        point.write_text(to_yaml(Config({**config, **_WRITES})), encoding="utf-8")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
        command = [*self._program, str(point), f"compile_report_file={folder / 'report.json'}"]
        most, bytes_limit = 0, min(_MORE_MEMORY * self._memory or host_memory(), host_memory())
        seconds_limit = max(_MORE_TIME * self._seconds, _LEAST_SECONDS)
        with (folder / "output").open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)
        self._process, limit = process, ""
        while process.poll() is None:
            most = max(most, _resident(process.pid))
            if most > bytes_limit:
                limit = f"the compiler took more than {si(bytes_limit, 'B')} of this machine's memory"
            elif time.monotonic() - began > seconds_limit:
                limit = f"the compiler took more than {short_time(seconds_limit)}"
            if limit:
                process.kill()
                process.wait()
            time.sleep(_POLL)
        return limit, most


def _resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes; 0 on systems without /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _reason(code: int, output: str) -> str:
    """Returns why a compilation failed: its error message, the signal that ended it, or its last line of output."""
    if code < 0:
        return f"the compiler was ended by {signal.Signals(-code).name}"
    lines = [line for line in output.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "no output")
    after = lines[lines.index(said) + 1 :] if said.startswith("error: ") and said.endswith(":") else []
    return " ".join([said.removeprefix("error: "), *(line.strip() for line in after)])[:400]

"""Compiles one configuration in a process, by `trainer.train_compile`, and makes the journal's row of it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.dump import as_words, to_flow
from trainer.config.environment import PREFIX
from trainer.config.keys import Config
from trainer.config.schema import schema
from trainer.observe.text import short_time, si
from trainer.planning.candidate import FAILED, FITS, TOO_LARGE, kept
from trainer.training.memory import host_memory

# Keys with which train_compile would write files, and the key that the compilation itself sets.
_WRITES = ("compiled_trainstep_file", "compile_report_file", "dump_hlo")
_DOES_NOT_FIT = 3  # the exit code of train_compile
# Later compilations may take this many times the memory and the time of the largest earlier one.
_MORE_MEMORY, _MORE_TIME, _LEAST_SECONDS = 3, 10, 600
_POLL = 0.2  # seconds
_SIZE_OF_PAGE = os.sysconf("SC_PAGE_SIZE")


def words_of(config: Config, changes: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that gives `config` with `changes`, from base.yml alone."""
    values = dict(config.items()) | dict(changes)
    names = [
        name
        for name, key in schema().keys.items()
        if name not in _WRITES and (name in changes or to_flow(values[name]) != to_flow(key.default))
    ]
    return as_words(values, names)


class Compiler:
    """Runs compilations one after the other, each in its own process with a limit on memory and time."""

    def __init__(self, program: Sequence[str] = (sys.executable, "-m", "trainer.train_compile", "base.yml")):
        """`program`: the words of the command before the keys."""
        self._program = program
        self.memory, self.seconds = 0, 0.0  # the most that a compilation took so far
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, words: Sequence[str]) -> dict[str, Any]:
        """Returns the row of a compilation, without its key: `outcome`, `reason`, `report`, `wall_seconds`, `memory`.

        A crash, a time-out and a compiler without memory are outcomes.
        """
        with tempfile.TemporaryDirectory() as folder:
            report, output = Path(folder) / "report.json", Path(folder) / "output"
            command = [*self._program, *words, f"compile_report_file={report}"]
            environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
            began = time.monotonic()
            with output.open("wb") as file:
                self._process = process = subprocess.Popen(
                    command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
                try:
                    ended, memory = self._watch(process, began)
                finally:
                    self.end()
            row = {"wall_seconds": round(time.monotonic() - began, 1), "memory": memory}
            self.memory, self.seconds = max(self.memory, memory), max(self.seconds, row["wall_seconds"])
            code = process.returncode
            if not ended and code in (0, _DOES_NOT_FIT) and report.exists():
                outcome = FITS if code == 0 else TOO_LARGE
                return row | {"outcome": outcome, "reason": "", "report": kept(json.loads(report.read_text()))}
            return row | {
                "outcome": FAILED,
                "reason": ended or _reason(code, output.read_text(errors="replace")),
                "report": {},
            }

    def end(self) -> None:
        """Ends a running compilation and its children."""
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _watch(self, process: subprocess.Popen[bytes], began: float) -> tuple[str, int]:
        """Waits for `process`. Returns why it was ended early, or "", and the most memory that it took, in bytes."""
        bytes_limit = min(_MORE_MEMORY * self.memory or host_memory(), host_memory())
        seconds_limit = max(_MORE_TIME * self.seconds, _LEAST_SECONDS)
        most = 0
        while process.poll() is None:
            most = max(most, _resident(process.pid))
            if most > bytes_limit:
                return f"the compiler took more than {si(bytes_limit, 'B')} of this machine's memory", most
            if time.monotonic() - began > seconds_limit:
                return f"the compiler took more than {short_time(seconds_limit)}", most
            time.sleep(_POLL)
        return "", most


def _resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes; 0 where /proc does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _SIZE_OF_PAGE
    except (OSError, IndexError):
        return 0


def _reason(code: int, output: str) -> str:
    """Returns why a compilation failed: its error message, or the signal that ended it, or its last line."""
    if code < 0:
        return f"the compiler was ended by {signal.Signals(-code).name}"
    lines = [line for line in output.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "no output")
    after = lines[lines.index(said) + 1 :] if said.startswith("error: ") and said.endswith(":") else []
    return " ".join([said.removeprefix("error: "), *(line.strip() for line in after)])[:400]

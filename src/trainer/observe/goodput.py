"""goodput.jsonl: how a run spends its time, over all of its processes.

Each line is an event with its time in seconds since 1970. The field names are from ml_goodput_measurement 0.2.3, which
MaxText uses; only alive_time is not. The time between two successive events is attributed to the earlier one. A killed
process writes no job_end_time, and the time from its last event to the start of the next process counts as "between
processes". The events alive_time, one every 5 seconds, make this time short.
"""

import contextlib
import json
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from trainer.config.errors import UserError
from trainer.config.json_files import parsed
from trainer.config.words import counted
from trainer.observe.appended import AppendedFile, disk_errors
from trainer.observe.text import clock
from trainer.runtime.supervision import COMPILATION, END, EVALUATION, RESTORE, ROLLOUTS, START

GOODPUT_FILE = "goodput.jsonl"
STEPS, REPEATED, DATA, SAVE = "steps", "steps done again", "waiting for data", "save"
BETWEEN = "between processes"
PARTS = (STEPS, ROLLOUTS, DATA, REPEATED, START, RESTORE, COMPILATION, EVALUATION, SAVE, END, BETWEEN)
_JOB_START, _JOB_END, _STEP_START, _STEP = "job_start_time", "job_end_time", "step_start_time", "step_count"
_EVENT, _EVENT_START, _EVENT_END = (f"custom_badput_event_{what}" for what in ("type", "start_time", "end_time"))
_ALIVE, _ALIVE_SECONDS = "alive_time", 5.0
_TIMES = (_JOB_START, _STEP_START, _EVENT_START, _EVENT_END, _JOB_END, _ALIVE)
_EVENTS = (ROLLOUTS, START, RESTORE, COMPILATION, EVALUATION, SAVE, END)  # the valid types of events
_LATEST = 1e12  # the greatest valid time, in seconds since 1970
# Fields of the event that ends a step. They contain the seconds that the step waited for data or rollouts.
_WAITED = {"data_wait": DATA, "rollouts_wait": ROLLOUTS}


class Goodput:
    """The seconds that a run spent on each of PARTS, computed from its events. Uses 8 bytes per step.

    Attributes:
      processes: the number of successive processes of the run.
      early: how many of them began before the last event of their predecessor: they overlapped, or their clocks differ.
    """

    def __init__(self) -> None:
        self.processes = self.early = 0
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._first, self._steps = 0, array("d")  # seconds of each step's newest execution, from step `_first` on
        # The time of the last event; the current part; and the part that interrupts the current part ("": none).
        self._at, self._phase, self._nested = 0.0, "", ""

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds the next event. Ignores objects that are not events, for example in an edited file."""
        name = next((name for name in _TIMES if name in event), "")
        at, step, part = _seconds(event.get(name)), event.get(_STEP, 0), event.get(_EVENT)
        if at is None or not isinstance(step, int) or step < 0 or (name == _EVENT_START and part not in _EVENTS):
            return
        if self._phase:
            self.early += name == _JOB_START and at < self._at
            self._spend(BETWEEN if name == _JOB_START else self._nested or self._phase, max(0.0, at - self._at), event)
        self._at = at
        if name == _ALIVE:
            return
        self._nested = str(part) if name == _EVENT_START else ""
        if name == _JOB_START:
            self.processes, self._phase = self.processes + 1, START
        elif name == _STEP_START:
            self._phase = STEPS
            self._begin(step)
        elif name == _JOB_END:
            self._phase = ""
        elif self._nested == END:
            self._phase = END

    def _spend(self, part: str, seconds: float, event: Mapping[str, Any]) -> None:
        if part != STEPS:
            self._spent[part] += seconds
            return
        self._steps[-1] += seconds
        for field, reason in _WAITED.items():
            waited = min(self._steps[-1], _seconds(event.get(field)) or 0.0)
            self._spent[reason] += waited
            self._steps[-1] -= waited

    def _begin(self, step: int) -> None:
        """Begins a step. If the step was executed before, the time of its earlier execution, and of all recorded steps
        after it, becomes `REPEATED`."""
        kept = step - self._first
        if 0 <= kept <= len(self._steps):
            self._spent[REPEATED] += sum(self._steps[kept:])
            del self._steps[kept:]
        else:  # the step does not follow the recorded ones: the train state comes from another run
            self._spent[STEPS] += sum(self._steps)
            self._first, self._steps = step, array("d")
        self._steps.append(0.0)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each part that took any time, in the order of PARTS."""
        spent = self._spent | {STEPS: self._spent[STEPS] + sum(self._steps)}
        return {part: seconds for part, seconds in spent.items() if seconds}

    def total(self) -> str:
        """Returns a description of the total time: "1:02:11 in 3 processes"."""
        text = f"{clock(sum(self.seconds().values()))} in {counted(self.processes, 'process', 'processes')}"
        if self.early:
            text += f"; {counted(self.early, 'start')} before the last event of an earlier process (or clocks differ)"
        return text

    def __str__(self) -> str:
        spent = self.seconds()
        whole = sum(spent.values())
        shares = [f"{part} {seconds / whole:.1%}" for part, seconds in spent.items() if seconds >= 0.005 * whole]
        return f"{', '.join(shares)} of {self.total()}"


class Timeline:
    """Records the events of this process. A context manager that closes the file.

    The events before `open` are kept in memory, because the run has no folder yet.
    """

    def __init__(self, tell: Callable[[str, str], None] | None = None) -> None:
        """`tell`: see `runtime.supervision.pulse`."""
        self.goodput = Goodput()
        self._tell, self._phase = tell or (lambda word, text: None), START
        self._waiting: list[dict[str, Any]] | None = []
        self._file: AppendedFile | None = None
        self._path, self._before, self._size = Path(), 0, 0  # the file, its size before this process, its size now
        self._using, self._ended = threading.Lock(), threading.Event()
        self.started = time.perf_counter()
        self._offset = time.time() - self.started  # the machine's clock may be changed during training
        self._write(_JOB_START)

    def open(
        self, folder: Path, writes: bool, resumes: bool, say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Writes all events so far to the file in the run's `folder`. Later events are written immediately, and a
        thread records that this process is alive. Does nothing if the file is already open.

        A UserError before the first step removes this process's events from the file: the command is refused.

        `writes`: whether this process writes the file; otherwise its events are dropped.
        `resumes`, `say`, `check`: see `AppendedFile`. Raises UserError if the file cannot be written.
        """
        if self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        if not writes:
            return
        self._path = folder / GOODPUT_FILE
        with disk_errors(self._path, resumes):
            found = self._path.read_bytes() if self._path.exists() else b""
        self.goodput, self._file = read_goodput(folder), AppendedFile(self._path, resumes, say, check)
        self._before = self._size = len(found)
        if found and not found.endswith(b"\n"):  # a killed process left an incomplete line
            self._append(self._file, b"\n")
        for event in waiting:
            self._record(event)
        threading.Thread(target=self._live, daemon=True).start()

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts the time of the `with` block as `part` instead of as a step. These blocks must not be nested."""
        self._write(_EVENT_START, **{_EVENT: part})
        self._tell("done", part)
        yield
        self._write(_EVENT_END, **{_EVENT: part})
        self._tell("done", self._phase)

    def step(self, step: int, **waited: float) -> None:
        """Begins a step. `waited`: the seconds that the previous step waited for data (argument `data_wait`) or for
        rollouts (argument `rollouts_wait`)."""
        self._write(_STEP_START, **{_STEP: step}, **waited)
        self._begins(f"step {step}")

    def place(self, folder: Path) -> None:
        """Tells the supervisor the run's local folder."""
        self._tell("folder", str(folder))

    def within(self, part: str) -> None:
        """Tells the supervisor that a step is waiting for `part`; "": the wait has ended."""
        self._tell("in", part)

    def end(self) -> None:
        """Marks the end of the run's steps. Evaluations and saves may follow."""
        self._write(_EVENT_START, **{_EVENT: END})
        self._begins(END)

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes an object that is not an event: it must have no field of `_TIMES`."""
        with self._using:
            self._record(row)

    def finish(self) -> None:
        """Marks the end of this process. The time until another process continues the run is not counted."""
        self._ended.set()
        self._write(_JOB_END)

    def _begins(self, phase: str) -> None:
        self._phase = phase
        self._tell("done", phase)

    def _live(self) -> None:
        while not self._ended.wait(_ALIVE_SECONDS):
            with contextlib.suppress(UserError):  # the main thread will raise it
                self._write(_ALIVE)

    def _write(self, name: str, **fields: Any) -> None:
        with self._using:
            if name == _ALIVE and self._ended.is_set():
                return
            event = {name: self._offset + time.perf_counter(), **fields}
            if self._waiting is not None:
                self._waiting.append(event)
            else:
                self._record(event)

    def _record(self, event: Mapping[str, Any]) -> None:
        if self._file is not None:
            self.goodput.add(event)
            self._append(self._file, f"{json.dumps(event)}\n".encode())

    def _append(self, file: AppendedFile, data: bytes) -> None:
        file.append(data)
        self._size += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        with self._using, contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
                refused = isinstance(error[1], UserError) and self._phase == START
                if refused and self._path.stat().st_size == self._size:  # no new owner of the run has written to it
                    os.truncate(self._path, self._before)


def read_goodput(folder: Path) -> Goodput:
    """Returns the goodput of the run in `folder`; it is empty if the file is missing."""
    goodput = Goodput()
    with contextlib.suppress(OSError), (folder / GOODPUT_FILE).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                event = parsed(line)
                if isinstance(event, dict):
                    goodput.add(event)
    return goodput


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < _LATEST else None

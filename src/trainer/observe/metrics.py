"""metrics.jsonl: one JSON object per line."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.config.json_files import parsed
from trainer.observe.appended import AppendedFile, disk_errors
from trainer.runtime.folders import replace_file

METRICS_FILE = "metrics.jsonl"
TASKS_TIME = "eval_tasks_time"  # present in every row of an evaluation on tasks, and in no other row
TASKS_FAILED = "eval_tasks_failed"  # the number of tasks whose evaluation failed
# Fields that measure time. Two runs of the same command differ only in these fields.
TIMING_FIELDS = ("step_time", "tokens_per_second", "eval_time", TASKS_TIME, "rollout_time", "data_wait")
_LAST_STEP = 2**53  # a float represents every integer up to this one exactly


class MetricsWriter(AppendedFile):
    """Appends rows to folder/metrics.jsonl and flushes each. A context manager.

    Floats survive a round trip bit for bit. NaN and infinities are written as NaN, Infinity and -Infinity, which
    Python's json accepts and strict JSON parsers reject.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        name: str = METRICS_FILE,
        *,
        resumes: bool = True,
        say: Callable[[str], None] = print,
        check: Callable[[], None] = lambda: None,
    ):
        """If the file exists, keeps its rows of steps below `step`, and removes later rows and a truncated last line.

        `resumes`, `say`, `check`: see `AppendedFile`; `say` gets a line if the file has to be written again.

        Raises:
          UserError: the file cannot be written, or a line is not a valid row.
        """
        path = folder / name
        with disk_errors(path, resumes):
            self.kept = _cut(path, step) if path.exists() else []
        super().__init__(path, resumes, say, check)

    def write(self, row: Mapping[str, float | int | str | list[float]]) -> None:
        """Appends `row`. Its values must be built-in Python numbers, strings and lists.

        Raises:
          TypeError: a value is an array or a NumPy scalar; nothing is written.
          UserError: the disk is full.
        """
        self.append(f"{json.dumps(dict(row))}\n".encode())


class TokensSeen:
    """Counts the tokens that contribute to the loss, over all steps of a run, including skipped steps."""

    def __init__(self, kept: Iterable[Mapping[str, Any]] = ()):
        """Starts with the tokens in the rows `kept`. Ignores non-integer values, for example in an edited file."""
        counts = (row.get("tokens", 0) for row in kept)
        self._count = sum(count for count in counts if isinstance(count, int))

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Counts the tokens of the next step's `row`, and returns `row` with the new count in the field tokens_seen."""
        self._count += row["tokens"]
        return {**row, "tokens_seen": self._count}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, except a truncated last one. Raises UserError if another line is invalid."""
    rows = []
    *lines, last = path.read_bytes().decode("utf-8", "replace").split("\n")
    # Text after the last newline is a truncated row, or zeros from a power cut.
    if last and last[0] not in "{\0":
        lines.append(last)
    for number, line in enumerate(lines, 1):
        try:
            row = parsed(line)
            if not 0 <= row["step"] <= _LAST_STEP:
                raise ValueError(f"step {row['step']}")
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is damaged: line {number} is not a row with a step; fix or remove that line"
            ) from error
        rows.append(row)
    return rows


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Atomically removes the rows whose step is not below `step`, and returns the remaining rows."""
    rows = [row for row in read_rows(path) if row["step"] < step]
    replace_file(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return rows

"""metrics.jsonl: one JSON object per line."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.config import UserError
from trainer.runtime.folders import appended, replace_file
from trainer.runtime.storage import remedy

METRICS_FILE = "metrics.jsonl"
# Fields that measure time. Two runs of the same command differ only in these.
TIMING_FIELDS = ("step_time", "tokens_per_second", "eval_time", "data_wait")
_LAST_STEP = 2**53  # a float holds every step up to it


class MetricsWriter:
    """Appends rows to folder/metrics.jsonl and flushes each. A context manager.

    Floats survive a round trip bit for bit. NaN and infinities are written as NaN, Infinity and -Infinity, which
    Python's json accepts and strict JSON parsers reject.
    """

    def __init__(self, folder: Path, step: int = 0, name: str = METRICS_FILE, *, resumes: bool = True):
        """Keeps earlier rows with steps below `step`. Removes later rows and a truncated last line.

        `resumes`: whether the run saves checkpoints, for the message about a full disk.

        Raises:
          UserError: the file cannot be written, or a line is not a valid row.
        """
        self._path, self._resumes = folder / name, resumes
        with disk_errors(self._path, self._resumes):
            self.kept = _cut(self._path, step) if self._path.exists() else []
            self._file = appended(self._path)

    def write(self, row: Mapping[str, float | int | str | list[float]]) -> None:
        """Appends `row`. Its values must be built-in Python numbers, strings and lists.

        Raises:
          TypeError: a value is an array or a NumPy scalar; nothing is written.
          UserError: the disk is full.
        """
        line = f"{json.dumps(dict(row))}\n".encode()
        with disk_errors(self._path, self._resumes):
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Waits until all rows are on disk. Raises UserError like `write`."""
        with disk_errors(self._path, self._resumes):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def disk_errors(path: Path, resumes: bool) -> Iterator[None]:
    """Turns an OSError when writing `path` into a UserError. For `resumes` see `MetricsWriter`."""
    try:
        yield
    except OSError as error:
        what, remedied = f"cannot write {path}: {error.strerror or error}", remedy(error.errno)
        if resumes:
            what += "; the committed checkpoints are intact"
            remedied += " and run the same command again"
        else:
            remedied += ". The run saves no checkpoints, so it would start over"
        raise UserError(f"{what}: {remedied}") from error


class TokensSeen:
    """Counts the loss-bearing tokens in all steps of a run, including skipped steps."""

    def __init__(self, kept: Iterable[Mapping[str, Any]] = ()):
        """Continues the count of the rows in `kept`. Values that are no counts, from an edited file, are left out."""
        counts = (row.get("tokens", 0) for row in kept)
        self._count = sum(count for count in counts if isinstance(count, int))

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the row of the next step with the field tokens_seen, which includes the row's own tokens."""
        self._count += row["tokens"]
        return {**row, "tokens_seen": self._count}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, without a truncated last line.

    Raises:
      UserError: another line is not a valid row.
    """
    rows = []
    # Text after the last newline is a truncated row.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            if not 0 <= row["step"] <= _LAST_STEP:
                raise ValueError(f"step {row['step']}")
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is damaged: line {number} is not a row with a step; fix or remove that line"
            ) from error
        rows.append(row)
    return rows


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Atomically replaces the file by its rows with steps below `step`, and returns these rows."""
    rows = [row for row in read_rows(path) if row["step"] < step]
    replace_file(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return rows

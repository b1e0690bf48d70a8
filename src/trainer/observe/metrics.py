"""metrics.jsonl: one JSON object per line."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.config import UserError
from trainer.runtime.storage import remedy

METRICS_FILE = "metrics.jsonl"
# Fields that tell how long something took. Two runs of the same command differ in these alone.
TIMING_FIELDS = ("step_time", "tokens_per_second", "eval_time", "data_wait")


class MetricsWriter:
    """Appends rows to folder/metrics.jsonl, each flushed when it is written; a context manager.

    Floats are written so that reading gives the same bits back. NaN and infinities are written as NaN, Infinity and
    -Infinity, which Python's json reads and strict JSON readers do not.
    """

    def __init__(self, folder: Path, step: int = 0, name: str = METRICS_FILE, *, resumes: bool = True):
        """Rows of earlier runs stay up to but without `step`; later ones, and a line that was cut off, are removed.

        `resumes`: the run has checkpoints to go on from, for the message about a full disk.

        Raises:
          UserError: the file cannot be written, or a line of it is no row.
        """
        self._path, self._resumes = folder / name, resumes
        with self._disk_errors():
            self.kept = _cut(self._path, step) if self._path.exists() else []
            self._file = self._path.open("ab", buffering=0)

    def write(self, row: Mapping[str, float | int | str | list[float]]) -> None:
        """Append `row`; its values are Python's own numbers, strings and lists.

        Raises:
          TypeError: a value is an array or a NumPy scalar; nothing of the row is written.
          UserError: the disk is full.
        """
        line = f"{json.dumps(dict(row))}\n".encode()
        with self._disk_errors():
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Return when all rows are on the disk. Raises UserError as `write` does."""
        with self._disk_errors():
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what, remedied = f"cannot write {self._path}: {error.strerror or error}", remedy(error.errno)
            if self._resumes:
                what += "; the checkpoints that are committed are intact"
                remedied += " and give the same command again"
            else:
                remedied += ". The run saves no checkpoints, so it would begin again"
            raise UserError(f"{what}: {remedied}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that was cut off is left out.

    Raises:
      UserError: another line is no row.
    """
    rows = []
    # What follows the last line end is no row.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path} is damaged: line {number} is no row with a step; mend or remove that line"
            ) from error
        rows.append(row)
    return rows


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Leaves the rows below `step` in the file, which is replaced as a whole; gives them."""
    rows = [row for row in read_rows(path) if row["step"] < step]
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return rows

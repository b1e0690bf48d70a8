"""metrics.jsonl: one JSON object per line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

METRICS_FILE = "metrics.jsonl"
# Fields that tell how long something took. Two runs of the same command differ in these alone.
TIMING_FIELDS = ("step_time", "tokens_per_second", "eval_time", "data_wait")


class MetricsWriter:
    """Appends rows to run_dir/metrics.jsonl, each flushed when it is written; a context manager.

    Floats are written so that reading gives the same bits back. NaN and infinities are written as NaN, Infinity and
    -Infinity, which Python's json reads and strict JSON readers do not.
    """

    def __init__(self, run_dir: Path, step: int = 0):
        """Rows of earlier runs stay up to but without `step`; later ones, and a line that was cut off, are removed."""
        path = run_dir / METRICS_FILE
        self.kept = _cut(path, step) if path.exists() else []
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, float | int | str | list[float]]) -> None:
        """Append `row`; its values are Python's own numbers, strings and lists.

        Raises:
          TypeError: a value is an array or a NumPy scalar; nothing of the row is written.
        """
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        os.fsync(self._file.fileno())

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
    """The rows of a metrics.jsonl; a last line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last line end is no row


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Leaves the rows below `step` in the file, which is replaced as a whole; gives them."""
    rows = [row for row in read_rows(path) if row["step"] < step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(path)
    return rows

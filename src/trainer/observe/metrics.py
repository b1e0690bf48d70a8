"""metrics.jsonl: one JSON object per line."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends rows to run_dir/metrics.jsonl, each flushed when it is written; a context manager.

    Floats are written so that reading gives the same bits back. NaN and infinities are written as NaN, Infinity and
    -Infinity, which Python's json reads and strict JSON readers do not.
    """

    def __init__(self, run_dir: Path):
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, row: Mapping[str, float | int | str | list[float]]) -> None:
        """Append `row`; its values are Python's own numbers, strings and lists.

        Raises:
          TypeError: a value is an array or a NumPy scalar; nothing of the row is written.
        """
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

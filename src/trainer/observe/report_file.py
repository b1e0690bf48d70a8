"""Keeps report.html in a run's folder up to date during the run."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.observe.goodput import Goodput
from trainer.observe.record import Record, begun
from trainer.observe.report import report_html
from trainer.observe.rollouts import newest_rollouts
from trainer.observe.rundir import REPORT_FILE
from trainer.runtime.folders import replace_file


class ReportFile:
    """Writes report.html. The time per write does not grow with the number of steps.

    The data of the page is kept in memory; only the rollouts are read again from their file.

    A failure to write the page does not end the run. It causes a warning, unless the previous warning had the same
    reason.
    """

    def __init__(
        self,
        folder: Path,
        rows: Iterable[Mapping[str, Any]],
        say: Callable[[str], None],
        goodput: Goodput | None = None,
    ):
        """`rows`: the rows of metrics.jsonl for earlier steps. `goodput`: the record of the run's time, which the run
        updates; if it is None, the record is read once from the folder."""
        self._folder, self._say, self._said = folder, say, ""
        self._next = 0.0
        self._record = self._begun(rows)
        if self._record is not None and goodput is not None:
            self._record.goodput = goodput

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the next row of metrics.jsonl."""
        if self._record is not None:
            self._record.add(row)

    def refresh(self) -> None:
        """Writes the page if the time since the last write is at least 100 times as long as that write took."""
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Writes the page."""
        if self._record is None:
            return
        began = time.monotonic()
        try:
            self._record.rollouts = newest_rollouts(self._folder)
            replace_file(self._folder / REPORT_FILE, report_html([self._record]))
        except (OSError, UserError) as error:
            self._warn(error)
        ended = time.monotonic()
        self._next = ended + 100 * (ended - began)

    def _begun(self, rows: Iterable[Mapping[str, Any]]) -> Record | None:
        try:
            return begun(self._folder, rows)
        except (OSError, UserError) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if str(error) != self._said:
            self._said = str(error)
            self._say(f"warning: {self._folder / REPORT_FILE} is not written: {error}")

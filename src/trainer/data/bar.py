"""Shows the progress of a long task: a bar on a terminal, otherwise lines at intervals."""

import threading
import time
from collections.abc import Callable

from tqdm import tqdm

_INTERVAL = 10.0  # seconds between two lines if stderr is not a terminal


class Bar:
    """Shows progress from 0 to 1, with an ETA: as a bar if stderr is a terminal, otherwise as lines at intervals. A
    thread updates the display, because progress may not be reported for minutes, for example during a long document."""

    def __init__(self, say: Callable[[str], None], label: str):
        self._say, self._label, self._share, self._start = say, label, 0.0, 0.0
        self._bar = tqdm(total=100, desc=label[:40], unit="%", leave=False, disable=None, mininterval=0.2)
        self._started, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, share: float) -> None:
        self._share = share

    def start(self, share: float) -> None:
        """Sets the share that was done before the bar started. The speed and the ETA do not include this share."""
        self._share = self._start = share

    def _show(self) -> None:
        while not self._ended.wait(_INTERVAL if self._bar.disable else 0.2):
            share, seconds = self._share, time.monotonic() - self._started
            if not self._bar.disable:
                self._bar.n = round(100 * share, 1)
                self._bar.refresh()
            else:
                done = share - self._start
                left = f"{100 * share:.0f} %, {seconds * (1 - share) / done:.0f} s left" if done > 0 else ""
                self._say(f"{self._label}: {left or f'{seconds:.0f} s so far'}")

    def __enter__(self) -> "Bar":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.close()

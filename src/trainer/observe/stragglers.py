"""Finds the processes of a run that delay the others because of their host.

All processes measure the same time for a step, because each waits for the others within the step. They differ in host
time: the time that the loop spends on data, files and Python instead of waiting for devices. Host time costs nothing
while the devices compute. In a step that consists almost entirely of host time, however, the devices wait for the host.
Therefore, host time counts only in these steps. A slow accelerator is not detected, because its host waits for it, as
all other hosts do.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np

# A process is late if, in `_PERIODS` consecutive periods, its mean host time exceeds the median of all processes by
# more than the share `_SHARE` of a step's time. The median of an even number is the lower of the two in the middle,
# because the mean of two processes would hide half of their difference.
_SHARE, _PERIODS = 0.1, 5
_BUSY = 0.9  # host time counts only in a step of which it takes more than this share


class Stragglers:
    """Compares the mean host times of all processes every `period` steps. Reports a process each time it becomes late.

    The processes exchange the means of a period during the next period and read them at its end, so that no process
    waits for the exchange.
    """

    def __init__(
        self,
        period: int,
        hosts: Sequence[str],
        gather_later: Callable[[Sequence[float]], Callable[[], Any]],
        say: Callable[[str], None],
        write: Callable[[Mapping[str, Any]], None],
    ):
        """`hosts`: the hosts of the processes, in process order. `gather_later`: see `runtime.agreement`. `write`: gets
        the times of all processes, in process order, for each period but the last. `step` is a period's last step."""
        self._period, self._hosts, self._gather_later, self._say = period, hosts, gather_later, say
        self._write = write
        self._times: list[tuple[float, float, float]] = []
        self._gathered: Callable[[], Any] | None = None
        self._late = np.zeros(len(hosts), int)  # for each process, the number of consecutive periods above the limit

    def add(self, step: int, own: float, waited: float, elapsed: float) -> None:
        """Adds the times of a step in seconds: the host time `own`, its part `waited` that was spent waiting for data,
        and the total `elapsed`.

        All processes must call it."""
        self._times.append((own if own > _BUSY * elapsed else 0.0, waited, elapsed))
        if (step + 1) % self._period == 0:
            if self._gathered is not None:
                means = np.asarray(self._gathered())
                times = ([float(f"{seconds:.4g}") for seconds in column] for column in means.T)
                names = ("host_time", "data_wait", "step_time")
                self._write({"step": step - self._period, **dict(zip(names, times, strict=True))})
                for line in self.late(means):
                    self._say(line)
            self._gathered, self._times = self._gather_later(np.mean(self._times, axis=0)), []

    def late(self, means: Any) -> list[str]:
        """Returns a line for each process that has just become late.

        `means`: [processes, 3], for each process, the means over a period of the three times that are given to `add`.
        """
        own, waited, elapsed = np.asarray(means).T
        middle, step = median_low(own), median_low(elapsed)
        self._late = np.where(own > middle + _SHARE * step, self._late + 1, 0)
        return [
            f"process {i} of {len(own)} ({self._hosts[i]}) keeps the others waiting: its host takes "
            f"{own[i]:.3f} s of a step of {step:.3f} s (median of all processes: {middle:.3f} s), "
            f"including {waited[i]:.3f} s of waiting for data"
            for i in np.flatnonzero(self._late == _PERIODS).tolist()
        ]

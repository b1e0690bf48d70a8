"""The result of compiling one point of a space."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FITS, TOO_LARGE, FAILED = "fits", "does not fit", "failed"
# The entries of a compile report that a row of the journal stores.
_KEPT = ("peak_bytes", "hbm_bytes", "argument_bytes", "host_bytes", "flops", "hbm_bytes_accessed", "estimate", "mesh")


@dataclass(frozen=True)
class Candidate:
    """One compiled configuration.

    Attributes:
      changes: the settings that override the plan's configuration.
      outcome: FITS, TOO_LARGE or FAILED.
      tokens: tokens per update, over all devices.
      row: the candidate's row in the journal.
    """

    changes: Mapping[str, Any]
    outcome: str
    tokens: int
    row: Mapping[str, Any]

    @property
    def seconds(self) -> float | None:
        """Seconds per step according to the compiler's schedule; None without an estimate."""
        estimate = self.row["report"].get("estimate")
        return estimate["scheduled_seconds"] if estimate else None

    @property
    def lower_bound(self) -> bool:
        """Whether a loop's unknown trip count makes `seconds` a lower bound, which cannot be ranked."""
        estimate = self.row["report"].get("estimate")
        return bool(estimate and estimate["lower_bound"])

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all devices; 0.0 without an estimate."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def memory(self) -> int | None:
        """Bytes that the step uses on a device; None if the compilation failed."""
        return self.row["report"].get("peak_bytes")

    @property
    def excess(self) -> int:
        """Bytes by which the step exceeds the memory of a device; 0 if it fits."""
        return max(0, self.row["report"]["peak_bytes"] - self.row["report"]["hbm_bytes"])

    @property
    def per_token(self) -> dict[str, float]:
        """A dict from the name of a resource to the amount of it that a step uses on one device, per token of the
        update."""
        report, names = self.row["report"], {"flops": "FLOPs", "hbm_bytes_accessed": "bytes in memory"}
        names["network_bytes"] = "bytes over the network"
        return {name: report[key] / self.tokens for key, name in names.items()}


def kept(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a `trainer.train_compile` report that a row stores."""
    network = sum(collective["bytes"] for collective in report["collectives"] if not collective["conditional"])
    return {name: report[name] for name in _KEPT} | {"network_bytes": network}

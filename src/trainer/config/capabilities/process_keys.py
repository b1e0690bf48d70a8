"""The keys for the connection, devices and supervision of processes. None of these keys affects the training result."""

import re

from trainer.config.key_rows import Check, Inert, Resume, Row
from trainer.config.keys import Config

PROCESSES = (
    *("hardware", "coordinator_address", "num_processes", "process_id", "skip_jax_distributed_system"),
    *("jax_distributed_initialization_timeout", "jax_distributed_heartbeat_timeout_seconds"),
)
SUPERVISION = ("supervise", "hang_timeout_seconds", "hang_grace_seconds")


def _processes(config: Config) -> str | None:
    given = [bool(config.coordinator_address), config.num_processes > 0, config.process_id >= 0]
    if not any(given):
        return None
    if not all(given):
        return "give all three or none, such as coordinator_address=10.0.0.1:1234 num_processes=2 process_id=0"
    if not re.fullmatch(r".+:\d+", config.coordinator_address):
        return f"coordinator_address must be host:port; nearest: {config.coordinator_address}:1234"
    if config.process_id >= config.num_processes:
        return f"process ids start at 0; the largest is process_id={config.num_processes - 1}"
    return None


ROWS = (Row((*PROCESSES, *SUPERVISION), Resume.SAME_BITS, step=False),)
CHECKS: tuple[Check, ...] = ((("coordinator_address", "num_processes", "process_id"), _processes),)
INERT = (Inert(SUPERVISION[1:], lambda c: not c.supervise, "supervise=false"),)

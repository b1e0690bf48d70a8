"""The file starts.json, in which one entry describes each start of a run. Only the report reads this file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.json_files import parsed

STARTS_FILE = "starts.json"
_NEWEST_ONLY = ("sources", "sharding")  # fields that only the newest entry keeps, so that the file stays small


def with_start(path: Path, start: Mapping[str, Any], *, resumed: bool) -> str:
    """Returns the content of the file `path` with the entry `start` appended; see `training.reports.start_entry`.

    If `resumed`, the earlier entries are kept, without their fields in _NEWEST_ONLY. Otherwise, they are dropped.
    """
    earlier = read_starts(path) if resumed else []
    kept = [{name: value for name, value in entry.items() if name not in _NEWEST_ONLY} for entry in earlier]
    return json.dumps([*kept, dict(start)]) + "\n"


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Returns the valid entries in order; [] if the file is missing or damaged."""
    try:
        content = parsed(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return []
    entries = content if isinstance(content, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("step"), int)]

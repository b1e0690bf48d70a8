"""Writes configurations as YAML."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import yaml

from trainer.config.capabilities.process_keys import PROCESSES, SUPERVISION
from trainer.config.keys import Config
from trainer.config.schema import schema


def to_yaml(config: Config) -> str:
    """Returns `config` as the text of a yml from which `load` reads the same values. Keys are in the order of base.yml.

    Omits `run_name`, so that a command with this yml starts a new run. Also omits the keys for processes and their
    supervision.
    """
    left_out = ("run_name", *PROCESSES, *SUPERVISION)
    lines = [f"{name}: {to_flow(config[name])}" for name in schema().keys if name not in left_out]
    return "\n".join(["base_config: base.yml", *lines, ""])


def to_flow(value: Any) -> str:
    """Returns `value` as YAML on one line, with strings in double quotes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_flow, value))}]"
    if isinstance(value, Mapping | ml_collections.ConfigDict):
        return f"{{{', '.join(f'{to_flow(key)}: {to_flow(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)  # the same text as YAML's for these common types, a hundred times faster
    return _known(value) if isinstance(value, str | float) else _dumped(value)


@functools.lru_cache(maxsize=1024)  # most strings and numbers are defaults, so they repeat
def _known(value: str | float) -> str:
    return _dumped(value, style='"' if isinstance(value, str) else None)


def _dumped(value: Any, style: str | None = None) -> str:
    dumped = yaml.safe_dump([value], default_flow_style=True, default_style=style, width=math.inf, allow_unicode=True)
    return dumped.strip()[1:-1]


def as_words(keys: Mapping[str, Any], names: Sequence[str] | None = None) -> list[str]:
    """Returns a command-line argument `key=value` for each key in `names` (default: for all keys)."""
    return [f"{name}={_text(keys[name])}" for name in (keys if names is None else names)]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    return value if isinstance(value, str) else to_flow(value)

"""Code that a folder names runs only if the command line names it, too (docs/guides/weights.md: what is trusted)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.files import COMMAND_LINE
from trainer.config.paths import path_problem
from trainer.config.schema import Key

_FOLDERS = ("load_parameters_path", "load_full_state_path")


def names_code(key: Key, value: Any) -> bool:
    """Whether `key=value` makes a program run code that is not the trainer's."""
    return (key.importable and value not in key.choices) or (key.name == "compiled_trainstep_file" and value != "")


def foreign_code(keys: Mapping[str, Key], config: Any, changed: Mapping[str, str]) -> list[str]:
    """A line for each key that names code and is given by a yml out of the folder that the run starts from.

    Such a yml describes somebody's checkpoint. Any other yml is the person's own, who named it.

    Args:
      changed: where each given key comes from.
    """
    roots = [_root(config[name]) for name in _FOLDERS if config[name] and "://" not in config[name]]
    lines = []
    for name, where in changed.items():
        if where == COMMAND_LINE or not names_code(keys[name], config[name]):
            continue
        yml = Path(where.rpartition(":")[0]).resolve()
        if any(root is not None and yml.is_relative_to(root) for root in roots):
            lines.append(
                f"{name}={config[name]} ({where}): the folder that you start from names code, which is only run if you "
                f"name it, too: if you know it, add {name}={config[name]} to the command"
            )
    return lines


def _root(text: str) -> Path | None:
    """The folder of a run whose checkpoints or checkpoints/N is given; else the folder itself."""
    if path_problem(text):
        return None
    path = Path(text).expanduser().resolve()
    if path.name == "checkpoints":
        return path.parent
    return path.parents[1] if path.parent.name == "checkpoints" else path

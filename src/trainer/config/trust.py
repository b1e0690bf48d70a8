"""Refuses keys that name code to import and are set by a folder's files, unless the command line sets them, too
(docs/guides/weights.md, What is trusted)."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.capabilities.all_keys import ROWS
from trainer.config.files import COMMAND_LINE, file_of
from trainer.config.keys import Config
from trainer.config.paths import path_problem
from trainer.config.schema import Key, schema

_STARTS = ("load_parameters_path", "load_full_state_path", "teacher_path")
_CODE = tuple(name for row in ROWS if row.code for name in row.names)
_READ = ("tokenizer_path", "hf_path", "dataset_path")


def names_code(key: Key, value: Any) -> bool:
    """Returns whether `key=value` makes a program run code that is not part of the trainer."""
    return (key.importable and value not in key.choices) or (key.name in _CODE and bool(value))


def foreign_code(
    keys: Mapping[str, Key], config: Config, changed: Mapping[str, str], chain: Sequence[Path]
) -> list[str]:
    """Returns a message for each key that names code and is set in an untrusted yml.

    A yml that belongs to a folder named by the command is untrusted, because it may come from someone else. Any other
    yml is trusted, because the user named it.

    Args:
      changed: the source of the value of each given key.
      chain: the yml of the command line and its parents, the topmost parent last.
    """
    given = {name: config[name] for name in (*_STARTS, *_READ) if config[name] and "://" not in config[name]}
    paths = {name: Path(text).expanduser() for name, text in given.items() if not path_problem(text)}
    # The parents of an untrusted yml are untrusted, too: the folder chooses them.
    first = next((i for i, yml in enumerate(chain) if any(_foreign(yml, *key) for key in paths.items())), len(chain))
    lines = []
    for name, where in changed.items():
        if where == COMMAND_LINE or file_of(where) not in chain[first:]:
            continue
        given = config[name]
        parts = given.items() if name == "teacher_overrides" else ((name, given),)
        lines += [_refusal(key, value, where) for key, value in parts if key in keys and names_code(keys[key], value)]
    return lines


def _foreign(yml: Path, key: str, path: Path) -> bool:
    """Returns whether `yml` belongs to the folder `path`, the value of `key`. This is the case if the yml is in this
    folder or, for keys in _STARTS, in one of its parent folders."""
    here = Path.cwd()
    if key in _READ:  # of data or a tokenizer; a folder that contains the current folder is the user's own
        root = path.resolve()
        return path.is_dir() and not here.is_relative_to(root) and _comes_from(yml, root)
    # The path as written, and the path with its links resolved.
    ends = [Path(os.path.normpath(path.absolute())), path.resolve()]
    folders = {yml.absolute().parent, yml.resolve().parent}
    around = any(end.is_relative_to(folder) and not here.is_relative_to(folder) for folder in folders for end in ends)
    return around or any(_comes_from(yml, root) for root in {_root(end).resolve() for end in ends})


def code_of_checkpoint(values: Mapping[str, Any], given: Collection[str], where: str) -> list[str]:
    """Returns a message for each key in `values` that names code and is not in `given`.

    Args:
      values: the keys of the checkpoint, with their values.
      given: the keys that the command line gives, which are allowed.
      where: the checkpoint, for messages.
    """
    keys = schema().keys
    return [
        _refusal(name, value, where)
        for name, value in values.items()
        if name not in given and names_code(keys[name], value)
    ]


def _refusal(name: str, value: Any, where: str) -> str:
    return (
        f"{name}={value} ({where}): code that a folder names runs only if you also name it; if you trust it, add "
        f"{name}={value} to the command"
    )


def _comes_from(yml: Path, root: Path) -> bool:
    """Returns whether `yml` is in the folder `root`, or is reached through a link in it."""

    def below(path: Path) -> bool:
        return any(parent.resolve().is_relative_to(root) for parent in (path, *path.parents))

    at = Path(yml.absolute().anchor)
    for part in yml.absolute().parts[1:]:
        if part != "..":
            at /= part
        elif below(at) and not at.resolve().is_relative_to(root):
            return True
        else:
            at = at.resolve().parent
    return below(at)


def _root(path: Path) -> Path:
    """Returns the folder of the run or the snapshot that `path` is part of; otherwise `path` itself."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" or (folder / "checkpoints") == path:
            return folder
        if folder.name.isdecimal() and folder.parent.name == "checkpoints":
            return folder.parent.parent
    return path.parents[1] if path.name == "items" and len(path.parts) > 2 else path

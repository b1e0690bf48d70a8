"""Code that a folder names runs only if the command line names it, too (docs/guides/weights.md: what is trusted)."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.files import COMMAND_LINE, file_of
from trainer.config.keys import Config
from trainer.config.paths import path_problem
from trainer.config.schema import Key, schema

_FOLDERS = ("load_parameters_path", "load_full_state_path")


def names_code(key: Key, value: Any) -> bool:
    """Returns whether `key=value` makes a program run code that is not part of the trainer."""
    return (key.importable and value not in key.choices) or (key.name == "compiled_trainstep_file" and value != "")


def foreign_code(
    keys: Mapping[str, Key], config: Config, changed: Mapping[str, str], chain: Sequence[Path]
) -> list[str]:
    """Returns a message for each key that names code and is given by a yml in the folder that the run starts from, or
    by a parent of such a yml.

    Such a yml describes a checkpoint that may be someone else's. Any other yml is trusted, because the user named it.

    Args:
      chain: the yml of the command line and its parents, the topmost parent last.
      changed: the source of each given key.
    """
    roots = [_root(config[name]) for name in _FOLDERS if config[name] and "://" not in config[name]]
    # Whatever such a yml names as its parent is the folder's choice, too.
    first = next(
        (i for i, yml in enumerate(chain) if any(root and _comes_from(yml, root) for root in roots)), len(chain)
    )
    named_by_folder = chain[first:]
    lines = []
    for name, where in changed.items():
        if where == COMMAND_LINE or not names_code(keys[name], config[name]):
            continue
        yml = file_of(where)
        if yml in named_by_folder:
            lines.append(_refusal(name, config[name], where))
    return lines


def _comes_from(yml: Path, root: Path) -> bool:
    """Returns whether `yml` is in the folder `root`, or is reached through a link in it."""

    def below(path: Path) -> bool:
        return any(it.resolve().is_relative_to(root) for it in (path, *path.parents))

    at = Path(yml.absolute().anchor)
    for part in yml.absolute().parts[1:]:
        if part != "..":
            at /= part
        elif below(at) and not at.resolve().is_relative_to(root):
            return True
        else:
            at = at.resolve().parent
    return below(at)


def code_of_checkpoint(values: Mapping[str, Any], given: Collection[str], where: str) -> list[str]:
    """Returns a message for each of a checkpoint's keys, `values`, that names code.

    Args:
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


def _root(text: str) -> Path | None:
    """Returns the run's folder if `text` is its checkpoints folder, a numbered checkpoint, or anything inside these;
    otherwise the folder itself."""
    if path_problem(text):
        return None
    path = Path(text).expanduser().resolve()
    if path.name == "checkpoints":
        return path.parent
    checkpoints = (it.parent for it in (path, *path.parents) if it.name.isdecimal() and it.parent.name == "checkpoints")
    return next((it.parent for it in checkpoints), path)

"""Output folders and files of commands, which appear under their final name only when they are complete."""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from trainer.config.errors import UserError, closed_at_interrupt, shortened
from trainer.config.paths import local_path, path_problem


def not_a_new_folder(path: Path) -> str | None:
    """Returns why the absolute `path` cannot be written as a new or empty folder; None if it can."""
    if path.is_symlink():
        return "is a symbolic link; give the folder itself"
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return "exists and is not an empty folder; choose a new one"
    above = next(parent for parent in path.parents if parent.exists())
    return None if above.is_dir() else f"{above} is a file"


def not_a_new_file(path: Path) -> str | None:
    """Returns why the absolute `path` cannot be written as a new file; None if it can."""
    if os.path.lexists(path):
        return "exists; choose a new file"
    above = next(parent for parent in path.parents if parent.exists())
    return None if above.is_dir() else f"{above} is a file"


def path_mistakes(paths: Sequence[str], named: Collection[str], *, file: bool = False) -> list[str]:
    """Returns the errors in `paths`, the first two arguments of a command: FROM and OUT.

    Args:
      named: the names of the command's NAME=VALUE arguments, to detect one given in place of a path.
      file: whether OUT must be a new file; otherwise, it must be a new or empty folder.
    """
    if len(paths) != 2 or any("=" in path and path.partition("=")[0] in named for path in paths):
        return ["the first two arguments are FROM and OUT"]
    if wrong := [f"{shortened(path)}: {problem}" for path in paths if (problem := path_problem(path))]:
        return wrong
    if "://" in paths[1]:
        return [f"{shortened(paths[1])}: only a local {'file' if file else 'folder'} can be written; give one"]
    problem = (not_a_new_file if file else not_a_new_folder)(local_path(paths[1]).absolute())
    return [f"{paths[1]}: {problem}"] if problem else []


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder next to `path`, and renames this folder to `path` at the end. After an error, removes the
    folder.

    Raises:
      UserError: the folder cannot be created.
    """
    partial = path.with_name(f"{path.name}.incomplete-{os.getpid()}")
    with closed_at_interrupt(lambda: _discard(partial)):
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{partial}: cannot be created: {error.strerror}") from error
        yield partial
        os.rename(partial, path)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file next to `path`, for the caller to write.

    At the end, syncs the temporary file and renames it to `path`. After an error, removes the temporary file.

    Raises:
      UserError: the file's folder cannot be created.
    """
    partial = path.with_name(f"{path.name}.incomplete-{os.getpid()}")
    with closed_at_interrupt(lambda: partial.unlink(missing_ok=True)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be created: {error.strerror}") from error
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.rename(partial, path)


def _discard(folder: Path) -> None:
    """Removes `folder` if it exists. Renames the folder first, because Orbax's threads may still write into it."""
    other = folder.with_name(f"{folder.name}-removed")
    for _ in range(3):
        with contextlib.suppress(OSError):
            folder.rename(other)
        shutil.rmtree(other, ignore_errors=True)

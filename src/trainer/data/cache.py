"""Folders of prepared data. One process makes a folder and commits it atomically, while others wait. A folder is
verified when it is read."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, shortened
from trainer.config.json_files import parsed
from trainer.config.paths import local_path
from trainer.runtime.lock import lock_file
from trainer.runtime.storage import user_cache

Progress = Callable[[str], None]
META = "meta.json"
BEGUN_BY = "TRAINER_PREPARES"  # the environment variable that marks worker processes which prepare data
HASHED = 1 << 30  # bytes; in larger folders only the sizes of files are verified


def cache_root(data_cache_directory: str) -> Path:
    """Returns the folder given by the key data_cache_directory; if the key is empty, `user_cache()`."""
    if data_cache_directory:
        return local_path(data_cache_directory, "data_cache_directory=").absolute()
    return user_cache()


def ensure(
    folder: Path, build: Callable[[Path], dict[str, Any]], progress: Progress, *, continues: bool = False
) -> None:
    """Makes `folder` unless it exists. `build(temporary folder)` writes the files and returns the dict for META.

    The temporary folder is next to `folder`, and is renamed to `folder` when it is complete. If several processes call
    this function, one builds and the others wait. `continues`: whether `build` can continue the work of an interrupted
    process in its temporary folder. Raises UserError if the files cannot be written.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    if BEGUN_BY in os.environ:  # the parent process holds the lock and waits for this process
        raise UserError(
            "a worker that prepares data runs the program again, because the program lacks the guard "
            '`if __name__ == "__main__":`; add it, or set prepare_workers=1'
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), progress):
            if folder.exists():
                return
            if not continues:
                # This process holds the lock, so any files are from a process that died.
                shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(exist_ok=True)
            try:
                commit(temporary, folder, build(temporary))
            except BaseException as error:
                # After a UserError, the user changes the data or the keys, so later runs use another folder.
                if not continues or (isinstance(error, UserError) and not isinstance(error, Unfinished)):
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise UserError(
            f"cannot write the prepared data to {folder.parent}: {error.strerror or error}; "
            "set data_cache_directory to a writable folder with enough space"
        ) from error


def commit(temporary: Path, folder: Path, meta: dict[str, Any]) -> None:
    """Writes META, with checksums of all files, to the folder `temporary`, and renames it to `folder`."""
    described = meta | {"files": _describe(temporary, _files(temporary))}
    (temporary / META).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    temporary.rename(folder)


def read_meta(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """Returns the dict that `build` returned to `ensure`. If `verify` is true, every file of `folder` is verified
    first; in folders larger than 1 GiB, only the file sizes are verified.

    Raises UserError if META cannot be read, or a file has changed.
    """
    try:
        meta = parsed((folder / META).read_text(encoding="utf-8"))
        files = {str(name): described for name, described in meta["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, META, f"cannot be read ({type(error).__name__}: {error})") from error
    if not verify:
        return meta
    if outside := [name for name in files if name.startswith("/") or ".." in name.split("/")]:
        raise damaged(folder, META, f"names a file outside of the folder ({shortened(outside[0])})")
    for name in files:
        if not (folder / name).is_file():
            raise damaged(folder, name, "cannot be read (it is gone)")
    for name, described in _describe(folder, files).items():
        if described != files[name]:
            raise damaged(folder, name, "has changed since it was written")
    return meta


def damaged(folder: Path, name: str, what: str) -> UserError:
    """Returns the error that the file `name` of a prepared folder is damaged. `what` continues the message after the
    name."""
    return UserError(f"prepared data: {folder / name} {what}; delete {folder} and the next run prepares it again")


class Unfinished(UserError):
    """Raised if the work was interrupted. Repeating the command continues the work."""


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    file = lock_file(path)
    if file is None:
        progress(f"another run is preparing {path.with_suffix('')}: waiting for it")
        file = lock_file(path, wait=True)
    assert file is not None
    with file:
        yield


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _describe(folder: Path, names: Iterable[str]) -> dict[str, int | str]:
    """Returns a dict from each file's name to its sha256 or, if the files are too large to read at each start, to its
    size."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    if sum(sizes.values()) > HASHED:
        return dict(sizes)
    return {name: _sha256(folder / name) for name in sizes}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

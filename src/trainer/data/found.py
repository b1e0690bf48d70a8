"""Finds the local and remote data files that the keys name, and announces which remote files are copied."""

import glob
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from trainer.config.capabilities.data_keys import parse_mixture
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.words import counted, sized
from trainer.data.cache import Progress, cache_root
from trainer.runtime.copies import Copies
from trainer.runtime.remote import RemoteFile, data_file, data_files


def copies_of(config: Config) -> Copies:
    """Returns the storage for copies of remote files."""
    return Copies(cache_root(config.data_cache_directory) / "copies", int(config.remote_copies_gib * 2**30))


def train_mixture(config: Config) -> list[tuple[str, Fraction]]:
    """Returns the globs of the training files, each with its weight."""
    path = config.grain_train_mixture_config_path
    return parse_mixture(config.grain_train_files, data_file(path, copies_of(config)) if "://" in path else path)


def find_files(config: Config, pattern: str, key: str) -> list[Any]:
    """Returns the files that a glob matches. Raises UserError if there are none. `key`: the key with the glob, for the
    message."""
    if paths := data_files(pattern, copies_of(config)):
        return paths
    if "://" in pattern:
        raise UserError(
            f"{key}: {pattern} matches no file; on a web server, a glob needs a page with links to the files, "
            "otherwise name each file"
        )
    folder = local_path(pattern).parent
    there = f"there is no folder {folder}" if not glob.glob(str(folder)) else f"{folder} has no file of that name"
    raise UserError(
        f"{key}: {pattern} matches no file ({there}); a glob is written as /data/*.{config.grain_file_type}"
    )


def announce_copies(config: Config, files: Sequence[Any], say: Progress, *, together: bool) -> None:
    """Tells the user which remote files are copied. `together`: whether all copies are needed at the same time.

    Raises UserError if the copies do not fit.
    """
    remote, copies = [file for file in files if isinstance(file, RemoteFile)], copies_of(config)
    if not remote:
        return
    for file in remote:
        copies.check(file)
    total = sum(file.size for file in remote)
    if together and total > copies.most:
        raise UserError(
            f"{counted(len(remote), 'remote file')} with {sized(total)} cannot be read by ranges and are needed at "
            f"the same time, but copies may take at most {sized(copies.most)}; raise remote_copies_gib, set "
            "data_pipeline=prepared to read the files one after the other, or use another format"
        )
    say(
        f"{counted(len(remote), 'remote file')} with {sized(total)} cannot be read by ranges ({remote[0]}, ...): each "
        f"is copied to {copies.folder} when it is read; up to {sized(copies.most)} of copies are kept "
        "(remote_copies_gib)"
    )

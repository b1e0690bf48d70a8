"""Checksums of a checkpoint's files: written before the checkpoint is committed, and verified before it is read.

The format of the arrays on disk has no checksums: without these separate checksums, a changed byte would silently
change a parameter. For files in a bucket, only sizes are compared, because the object store itself keeps checksums.
Several processes share the work: each process computes checksums of the files that it wrote, and verifies an equal
share of all files.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from trainer.config.errors import UserError, shortened
from trainer.config.json_files import read_object
from trainer.leaves.orbax import gone
from trainer.runtime.storage import COMMITTED, absolute, files_below, is_remote, size

T = TypeVar("T")

SUMS = "sums.json"
_PART = "sums-{}.json"  # the checksums of one process, until the first process merges them
_METADATA = "_CHECKPOINT_METADATA"  # JSON; Orbax adds the commit time to it after the checksums are computed
_WITHOUT = re.compile(rf"sums(-\d+)?\.json|{_METADATA}|{re.escape(COMMITTED)}")  # files that get no checksum
_WRITER = re.compile(r"(?:^|/)ocdbt\.process_(\d+)/")  # matches the number of the process that wrote the file
# The files of a checkpoint. File systems and programs may add others, such as .nfs0001 and .DS_Store.
_READ = re.compile(r"(state|run)/(.*/)?[^./][^/]*")
_CHUNK = 1 << 22  # bytes
_THREADS = min(16, os.cpu_count() or 1)


def write_sums(
    folder: Any, process: int = 0, processes: int = 1, meet: Callable[[str], Any] = lambda place: None
) -> None:
    """Writes the size and CRC-32 of every file in `folder` to sums.json in `folder`.

    Args:
      process: this process's index among `processes`. Every process calls this function; the first process calls it
        after all files are written. Each process computes checksums of the files that it wrote, and the first process
        merges the checksums.
      meet: a barrier that returns when every process has called it with the same name.
    """
    place = "/".join(absolute(folder).parts[-3:])  # without the mount point, which may differ between hosts
    meet(f"{place} is written")
    names = [name for name in _files(folder) if _writer(name) % processes == process]
    sums = dict(_in_threads(lambda name: (name, [size(folder / name), _crc(folder / name)]), names))
    if process:
        _write(folder / _PART.format(process), sums)
    meet(f"{place} is summed")
    if process == 0:
        for part in [folder / _PART.format(other) for other in range(1, processes)]:
            sums |= json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        _write(folder / SUMS, sums)


def verify(folder: Any, process: int = 0, processes: int = 1) -> None:
    """Verifies, in threads, the checksums of this process's share of a checkpoint's files.

    Raises:
      UserError: a file is missing or changed; the message names one such file.
    """
    entries = read_part(folder, SUMS).items()
    try:
        sums = {name: (_integer(length), crc) for name, (length, crc) in entries}
    except (ValueError, TypeError) as error:
        raise damaged(folder, SUMS, f"cannot be read ({type(error).__name__}: {error})") from error
    read_part(folder, _METADATA)
    if process == 0 and (others := sorted(name for name in set(_files(folder)) - sums.keys() if _READ.match(name))):
        raise UserError(
            f"checkpoint {folder}: {others[0]} has no checksum in {SUMS}: it was added later, or {SUMS} was changed; "
            "remove that file if it is not part of the checkpoint"
        )

    def compare(name: str) -> None:
        length, crc = sums[name]
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise damaged(folder, SUMS, f"names {shortened(name)}, which is not a file of the checkpoint")
        try:
            found = size(folder / name)
            other = found == length and crc is not None and _crc(folder / name) != crc
        except (OSError, ValueError) as error:  # ValueError: the name is not a valid file name
            why = getattr(error, "strerror", None) or error
            raise damaged(folder, name, f"cannot be read ({why})") from error
        if found != length:
            raise damaged(folder, name, f"has {found} bytes instead of {length}")
        if other:
            raise damaged(folder, name, "has changed since it was written")

    # Sorted by size, so that all processes verify about the same number of bytes.
    names = sorted(sums, key=lambda name: sums[name][0], reverse=True)
    list(_in_threads(compare, names[process::processes]))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{shortened(str(value))} is not a number of bytes")
    return value


def read_part(folder: Any, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a checkpoint. Raises UserError if the file is missing or invalid."""
    try:
        return read_object(folder / name)
    except UserError as error:
        reason = str(error).removeprefix(f"{folder / name}: ").removeprefix("cannot be read: ")
        raise damaged(folder, name, f"cannot be read ({reason})") from error


def damaged(folder: Any, name: str, what: str) -> UserError:
    """Returns the error for the damaged file `name` of a checkpoint. `what`: a phrase that follows the name in the
    message, such as "has changed"."""
    return gone(folder) or UserError(
        f"checkpoint {folder} is damaged: {name} {what}; to continue from the previous checkpoint, remove {folder}"
    )


def _files(folder: Any) -> list[str]:
    """Returns the names of the files in `folder` that must have checksums."""
    return [name for name in files_below(folder) if not _WITHOUT.fullmatch(name)]


def _writer(name: str) -> int:
    """Returns the number of the process that wrote a file; 0 if the file's name does not contain it."""
    found = _WRITER.search(name)
    return int(found[1]) if found else 0


def _in_threads(fn: Callable[[str], T], names: Sequence[str]) -> Iterator[T]:
    """Calls `fn` for each name in threads. Yields the results in the order of `names`. The first exception ends the
    iteration and cancels calls that have not started."""
    with ThreadPoolExecutor(_THREADS, "sums") as pool:
        yield from pool.map(fn, names)


def _write(path: Any, sums: dict[str, Any]) -> None:
    path.write_text(json.dumps(sums, indent=0) + "\n", encoding="utf-8")


def _crc(path: Any) -> int | None:
    if is_remote(path):
        return None
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc

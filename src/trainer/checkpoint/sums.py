"""Sums of a checkpoint's files: written before it is committed, compared before it is read.

The arrays themselves carry no checksum on the disk: without one, a changed byte would be a changed parameter. Of files
in a bucket only sizes are taken, without reading them: the store has checksums of its own, and changes no object.
"""

import json
import zlib
from typing import Any

from trainer.config import UserError
from trainer.runtime.storage import files_below, is_remote, size

SUMS = "sums.json"
_METADATA = "_CHECKPOINT_METADATA"  # JSON into which Orbax writes the time of the commit, after the sums were made
_CHUNK = 1 << 22  # bytes


def write_sums(folder: Any) -> None:
    """Writes the size and CRC-32 of every file below `folder` into it."""
    sums = {name: [size(folder / name), _crc(folder / name)] for name in _files(folder)}
    (folder / SUMS).write_text(json.dumps(sums, indent=0) + "\n", encoding="utf-8")


def verify(folder: Any) -> None:
    """Compares every file of a checkpoint with what was written.

    Raises:
      UserError: a file is missing, shorter, longer or other; the message names the first one.
    """
    try:
        sums = {name: (length, crc) for name, (length, crc) in json.loads((folder / SUMS).read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(folder, SUMS, f"cannot be read ({type(error).__name__}: {error})") from error
    try:
        json.loads((folder / _METADATA).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, _METADATA, f"cannot be read ({type(error).__name__}: {error})") from error
    for name, (length, crc) in sums.items():
        path = folder / name
        try:
            found = size(path)
            if found != length:
                raise damaged(folder, name, f"has {found} bytes of {length}")
            if crc is not None and _crc(path) != crc:
                raise damaged(folder, name, "is not what was written")
        except (OSError, ValueError) as error:  # ValueError: of a name that is none
            why = getattr(error, "strerror", None) or error
            raise damaged(folder, name, f"cannot be read ({why})") from error


def damaged(folder: Any, name: str, what: str) -> UserError:
    """The error for file `name` of a checkpoint; `what` goes on from its name."""
    return UserError(
        f"checkpoint {folder} is damaged: {name} {what}; to go on from the checkpoint before it, remove {folder}"
    )


def _files(folder: Any) -> list[str]:
    names = (SUMS, _METADATA)
    return [path for path in files_below(folder) if path.rpartition("/")[2] not in names]


def _crc(path: Any) -> int | None:
    if is_remote(path):
        return None
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc

"""Checks the unpacked sizes that compressed Parquet and Arrow files declare, before anything is unpacked.

A file of a few kilobytes can unpack to a gigabyte. Files in both formats contain the unpacked sizes, and the readers
fail if a size is wrong, so a file cannot evade the check with wrong sizes.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError
from trainer.config.limits import TOGETHER_BYTES, UNPACKED_BYTES, UNPACKED_RATIO

_MAGIC = b"ARROW1\0\0"  # the beginning of an Arrow file, before its Arrow stream
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2  # message types of the Arrow format
_BUFFERS, _COMPRESSION = 2, 3  # indices of fields in a record batch's metadata


def check_unpacked(path: Path) -> None:
    """Checks a .parquet or .arrow file; other files pass.

    Raises:
      UserError: the declared unpacked size is too large, in bytes and relative to the packed size.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                rows_at_once(path, file.metadata, None, 1)
        elif path.suffix == ".arrow":
            for packed, unpacked in _arrow_sizes(path):
                _check(path, packed, unpacked)
    except (pyarrow.ArrowException, OSError, struct.error, IndexError):
        pass  # the reader reports why the file is unreadable


def rows_at_once(
    path: Any, metadata: Any, columns: Sequence[str] | None, most: int, groups: Sequence[int] | None = None
) -> int:
    """Returns how many rows of a Parquet file to read at once: at most `most`, and fewer if a dictionary page is large,
    because each row may contain a copy of a large value from the dictionary. `columns` and `groups` are the top-level
    columns and the row groups to read (None: all). Raises UserError as `check_unpacked` does."""
    largest = 1
    with path.open("rb", buffering=0) as file:
        for group in map(metadata.row_group, range(metadata.num_row_groups) if groups is None else groups):
            for column in (group.column(i) for i in range(group.num_columns)):
                if columns is None or column.path_in_schema.partition(".")[0] in columns:
                    _check(path, column.total_compressed_size, column.total_uncompressed_size)
                    if column.has_dictionary_page and column.dictionary_page_offset:
                        file.seek(column.dictionary_page_offset)
                        with contextlib.suppress(IndexError):  # pyarrow reports an unreadable header
                            largest = max(largest, _page_size(file.read(16)))
    return max(1, min(most, TOGETHER_BYTES // largest))


def _check(path: Any, packed: int, unpacked: int) -> None:
    if unpacked > UNPACKED_BYTES and unpacked > UNPACKED_RATIO * packed:
        raise UserError(
            f"{path}: {packed:,} bytes of it unpack to {unpacked:,}, more than {UNPACKED_RATIO:,} times as many; store "
            "the file without compression if this is correct"
        )


def _page_size(header: bytes) -> int:
    """Returns the unpacked size of a Parquet page, field 2 of `header`, which is in Thrift's compact protocol."""
    numbers: list[int] = []
    at = 0
    while len(numbers) < 2:
        number, shift, at = 0, 0, at + 1  # skips the byte of the field header
        while header[at] & 128:
            number, shift, at = number | (header[at] & 127) << shift, shift + 7, at + 1
        numbers.append((number | header[at] << shift) >> 1)
        at += 1
    return numbers[1]


def _arrow_sizes(path: Path) -> Iterator[tuple[int, int]]:
    """Yields a pair for each batch of an Arrow file: its packed and its unpacked size."""
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            file.seek(0)
        for message in pyarrow.ipc.MessageReader.open_stream(file):
            if message.body is not None and message.type in ("record batch", "dictionary"):
                yield message.body.size, _unpacked(message.metadata.to_pybytes(), message.body)


def _unpacked(header: bytes, body: Any) -> int:
    """Returns the total unpacked size of a batch's buffers; 0 if the batch is not compressed. `header` is the batch's
    metadata, a flatbuffer; `body` contains the buffers."""

    def number(form: str, at: int) -> int:
        return struct.unpack_from(form, header, at)[0]

    def field(table: int, i: int) -> int:  # the offset of field `i` in `header`; 0 if absent
        names = table - number("<i", table)
        offset = number("<H", names + 4 + 2 * i) if 4 + 2 * i < number("<H", names) else 0
        return table + offset if offset else 0

    def follow(at: int) -> int:
        return at + number("<I", at)

    message = follow(0)
    batch = follow(field(message, 2))
    if header[field(message, 1)] == _DICTIONARY_BATCH:
        batch = follow(field(batch, 1))
    if not field(batch, _COMPRESSION):
        return 0
    buffers, total = follow(field(batch, _BUFFERS)), 0
    for i in range(number("<I", buffers)):
        start, size = struct.unpack_from("<qq", header, buffers + 4 + 16 * i)
        if size >= 8:
            total += max(0, struct.unpack("<q", body.slice(start, 8).to_pybytes())[0])
    return total

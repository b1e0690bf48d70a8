"""Writes the rows of metrics.jsonl as TensorBoard events, with MaxText's tags."""

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.observe.appended import AppendedFile, disk_errors
from trainer.runtime.crc32c import masked_crc32c

# TensorBoard reads every file whose name contains "tfevents". The folder is named as in MaxText. The file name is
# always the same, so that a resumed run appends to the file, and a running TensorBoard continues to read it.
EVENTS_FILE = "tensorboard/events.out.tfevents.trainer"
# A record consists of its length (uint64), a checksum of the length, the event, and a checksum of the event (uint32
# each), little-endian: TensorFlow's TFRecord format.
_HEAD, _TAIL = struct.Struct("<QI"), 4


class EventsWriter(AppendedFile):
    """Appends events to folder/tensorboard/ and flushes each row immediately. A context manager.

    Importing this module does not import tensorboardX, but creating a writer does.
    """

    def __init__(
        self,
        folder: Path,
        step: int = 0,
        *,
        resumes: bool = True,
        say: Callable[[str], None] = print,
        check: Callable[[], None] = lambda: None,
    ):
        """If the file exists, keeps its events of steps below `step`; removes later events and a truncated last one.

        `resumes`, `say`, `check`: see `MetricsWriter`.

        Raises:
          UserError: the file cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event

        path = folder / EVENTS_FILE
        with disk_errors(path, resumes):
            path.parent.mkdir(exist_ok=True)
        super().__init__(path, resumes, say, check)
        with disk_errors(path, resumes):
            # The file is truncated in place. The new records of repeated steps are as long as the old ones, so a
            # running TensorBoard can continue to read at its offset.
            self._file.truncate(_end(self._path, step))
            if not self._file.seek(0, os.SEEK_END):
                self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, row: Mapping[str, float | str]) -> None:
        """Appends an event with the numbers of `row`, whose keys are the tags. Raises UserError if the disk is full."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step" and not isinstance(value, str)
        ]
        self._append(Event(wall_time=time.time(), step=int(row["step"]), summary=Summary(value=values)))

    def _append(self, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = b"".join(
            [length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))]
        )
        self.append(record)


def _end(path: Path, step: int) -> int:
    """Returns the offset in bytes at which the events of steps below `step` end."""
    end = 0
    for event, after in _events(path):
        if event.step >= step and not event.file_version:
            break
        end = after
    return end


def _events(path: Path) -> Iterator[tuple[Any, int]]:
    """Yields the events of a file up to the first damaged event, each with the offset of its end."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            # After a power cut, a file can end with zeros, which match no checksum.
            if masked_crc32c(head[:8]) != checksum:
                return
            data = file.read(length)
            if len(data) < length or len(file.read(_TAIL)) < _TAIL:
                return
            try:
                event = Event.FromString(data)
            except DecodeError:
                return
            yield event, file.tell()

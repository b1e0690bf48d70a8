"""The endless streams of training batches, prepared or made during training, with the position after each batch."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from trainer.config.errors import UserError
from trainer.data.batches import Batch, RowSource, local_rows, make_batch, train_batch
from trainer.data.documents import Counts

Position = dict[str, Any]
# Maps each entry of a stream's identity (see `Dataset.identity`) to its name in messages.
_NAMES = {
    "format": "the version of the data preparation",
    "way": "data_pipeline",
    "documents": "the training documents",
    "tokenizer": "the tokenizer",
    "length": "max_target_length",
    "packing": "the packing",
    "order": "the shuffling",
    "logits": "the content of teacher_logits_path",
}


class Stream(Protocol):
    """Iterates over (batch, position): this process's part of each global batch, and the position after that batch.

    A position is a small JSON-compatible dict from which a stream can resume. If `per_process` is true, each process
    has a separate position.
    """

    per_process: bool

    def __iter__(self) -> "Stream": ...

    def __next__(self) -> tuple[Batch, Position]: ...

    def position(self) -> Position:
        """The current position."""
        ...

    def close(self) -> None:
        """Stops background work."""
        ...


class PreparedStream:
    """Batches of prepared rows. The position is the next row's index, which is the same for any number of processes."""

    per_process = False

    def __init__(
        self, source: RowSource, identity: Mapping[str, Any], position: Position | None, *, rows: int, **settings: Any
    ):
        """`rows`: the number of rows of a global batch; `settings`: further arguments of `train_batch`."""
        check_identity(identity, position)
        self._source, self._identity, self._rows, self._settings = source, dict(identity), rows, settings
        self._next = 0 if position is None else int(position["row"])

    def __iter__(self) -> "PreparedStream":
        return self

    def __next__(self) -> tuple[Batch, Position]:
        batch = train_batch(self._source, self._next, self._rows, **self._settings)
        self._next += self._rows
        return batch, self.position()

    def position(self) -> Position:
        """Returns the stream's identity and the index of the next row."""
        return {"identity": self._identity, "row": self._next}

    def close(self) -> None:
        """Does nothing."""


class StreamingStream:
    """Batches of rows made during training. The position is the state of this process's reading and packing."""

    per_process = True

    def __init__(
        self,
        dataset: Any,
        identity: Mapping[str, Any],
        position: Position | None,
        *,
        rows: int,
        workers: int,
        process_index: int,
        process_count: int,
        say: Callable[[str], None],
    ):
        import grain

        self._layout = {
            "process_count": process_count,
            "process_index": process_index,
            "grain_worker_count": workers,
            "grain": grain.__version__,
        }
        check_identity(identity, position)
        if position is not None:
            self._check_layout(position)
        self._identity, self._say, self._counts, self._said = dict(identity), say, Counts(), set[str]()
        self._row = local_rows(rows, process_index, process_count).astype(np.int32)
        self._iterator = dataset.__iter__()
        if position is not None:
            self._iterator.set_state(json.loads(json.dumps(position["state"])))

    def __iter__(self) -> "StreamingStream":
        return self

    def __next__(self) -> tuple[Batch, Position]:
        rows = [next(self._iterator) for _ in self._row]
        for row in rows:
            self._count(row["counts"])
        names = ("inputs", "targets", "segmentation", "loss")
        batch = make_batch(*(np.stack([row[name] for row in rows]) for name in names)) | {"row": self._row}
        return batch, self.position()

    def position(self) -> Position:
        """Returns the stream's identity, the state of its iterator, and the layout of processes and workers for which
        the state is valid."""
        # The conversion to JSON and back copies the state. It also raises an error at once if JSON cannot store the
        # state.
        state = json.loads(json.dumps(self._iterator.get_state()))
        return {"identity": self._identity, "place": self._layout, "state": state}

    def close(self) -> None:
        """Stops worker processes, and reports skipped and truncated documents."""
        self._iterator.close()
        for note in self._counts.notes():
            self._say(f"streaming, in this process: {note}")

    def _count(self, counts: Counts) -> None:
        self._counts.add(counts)
        for kind, note in self._counts.notes_by_kind().items():
            if kind not in self._said:
                self._said.add(kind)
                self._say(f"streaming, so far: {note}")

    def _check_layout(self, position: Position) -> None:
        for key, now in self._layout.items():
            if (then := position["place"][key]) != now:
                raise UserError(
                    f"the saved position in the data belongs to {key}={then}, but now the value is {now}: a streamed "
                    "corpus can resume only with the same value; use that value, or data_pipeline=prepared, which "
                    "resumes on any number of processes"
                )


class RepeatedStream:
    """Repeats the first batch of `stream` forever. The position always remains the one before this batch, so that a
    resumed run repeats the same batch."""

    def __init__(self, stream: Stream):
        self._stream, self.per_process = stream, stream.per_process
        self._first: tuple[Batch, Position] | None = None

    def __iter__(self) -> "RepeatedStream":
        return self

    def __next__(self) -> tuple[Batch, Position]:
        if self._first is None:
            before = self._stream.position()
            batch, _ = next(self._stream)
            self._first = batch, before
        return self._first

    def position(self) -> Position:
        """Returns the position before the batch."""
        return self._stream.position() if self._first is None else self._first[1]

    def close(self) -> None:
        """Stops background work."""
        self._stream.close()


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Returns a short hash of a stream's identity."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]


def check_identity(identity: Mapping[str, Any], position: Position | None) -> None:
    """Raises UserError if `position` belongs to a stream with another identity. The message names the first
    difference."""
    if position is None:
        return
    then = position["identity"]
    for key, now in identity.items():
        if then.get(key) != now:
            raise UserError(
                f"the saved position in the data belongs to other data: {_NAMES[key]} was {then.get(key)} and is "
                f"{now} now; continue with the settings, the files and the version of trainer that saved it, or start "
                "a new run"
            )

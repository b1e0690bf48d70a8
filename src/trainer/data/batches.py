"""Makes global batches from the rows of a source. A training batch is a pure function of the index of its first row.

A batch is a dict of int32 numpy arrays with shape [rows, length]: `inputs`, `targets`, `inputs_position`,
`inputs_segmentation` and `targets_segmentation`; and `row` with shape [rows], each row's index in the global batch.
Segment ids start at 1 in each row, and 0 is padding. A target contributes to the loss if its `targets_segmentation` is
not 0.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from trainer.data.order import visited

Batch = dict[str, np.ndarray]
# The arrays of a batch with shape [rows, length].
FIELDS = ("inputs", "targets", "inputs_position", "inputs_segmentation", "targets_segmentation")


class RowSource(Protocol):
    """Rows of `length` tokens with random access. `size` is the number of rows; None if the source is endless."""

    @property
    def size(self) -> int | None: ...

    @property
    def length(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows at `indices` [n], in that order, as a batch without `row`. Indices are in [0, size)."""
        ...


def local_rows(global_rows: int, process_index: int = 0, process_count: int = 1) -> np.ndarray:
    """Returns the indices of this process's rows in a global batch: contiguous, [global_rows / process_count]."""
    share, rest = divmod(global_rows, process_count)
    if rest or not 0 <= process_index < process_count:
        raise ValueError(f"{global_rows} rows do not split over process {process_index} of {process_count}")
    return np.arange(process_index * share, (process_index + 1) * share, dtype=np.int64)


def train_batch(
    source: RowSource,
    first: int,
    global_rows: int,
    *,
    seed: int,
    shuffle: bool,
    process_index: int = 0,
    process_count: int = 1,
) -> Batch:
    """Returns this process's part of the global batch that begins with row `first`. The part depends only on the
    arguments.

    The batch consists of rows [first, first + global_rows) of one endless sequence, which concatenates epochs of the
    source. With `shuffle`, each epoch has a different order, drawn from `seed`; otherwise every epoch has the source's
    order. A batch may span two epochs. The only state is `first`, which is independent of the number of processes, so a
    run can resume on any number of processes.
    """
    row = local_rows(global_rows, process_index, process_count)
    indices = first + row
    if source.size is not None:
        indices = visited(indices, source.size, seed=seed, shuffle=shuffle)
    return source.rows(indices) | {"row": row.astype(np.int32)}


def eval_batches(
    source: RowSource, rows: int, max_batches: int = -1, *, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Makes one pass over the source: yields this process's part of each global batch of `rows` rows, in order.

    Yields at most `max_batches` batches (-1: all). All batches have the same shape: the last one is padded with rows of
    zeros, which do not contribute to the loss.
    """
    if source.size is None:
        raise ValueError("an endless source has no evaluation pass")
    row = local_rows(rows, process_index, process_count)
    count = -(-source.size // rows)
    for batch in range(count if max_batches < 0 else min(count, max_batches)):
        indices = batch * rows + row
        indices = indices[indices < source.size]
        arrays = {name: np.zeros((len(row), source.length), np.int32) for name in FIELDS}
        if len(indices):
            for name, values in source.rows(indices).items():
                arrays[name][: len(indices)] = values
        yield arrays | {"row": row.astype(np.int32)}


def make_batch(
    inputs: np.ndarray, targets: np.ndarray, segmentation: np.ndarray, loss: np.ndarray | None = None
) -> Batch:
    """Returns a batch without `row`, made from arrays [rows, length] of any integer type.

    Positions are computed from `segmentation`. Targets where `loss` is 0 do not contribute to the loss. Without `loss`,
    all targets except padding contribute.
    """
    segmentation = segmentation.astype(np.int32)
    return {
        "inputs": inputs.astype(np.int32),
        "targets": targets.astype(np.int32),
        "inputs_position": positions(segmentation),
        "inputs_segmentation": segmentation,
        "targets_segmentation": segmentation.copy() if loss is None else segmentation * (loss != 0),
    }


def positions(segmentation: np.ndarray) -> np.ndarray:
    """Returns positions [rows, length], int32, that count from 0 in each segment; 0 in padding."""
    column = np.arange(segmentation.shape[1], dtype=np.int32)
    starts = np.zeros(segmentation.shape, np.int32)
    starts[:, 1:] = np.where(segmentation[:, 1:] != segmentation[:, :-1], column[1:], 0)
    return (column - np.maximum.accumulate(starts, axis=1)) * (segmentation != 0)

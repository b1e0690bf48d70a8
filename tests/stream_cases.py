"""Batches of a dataset, and a comparison of two lists of batches."""

import numpy as np

from trainer.config.capabilities.invariant_keys import TILE
from trainer.data.batches import FIELDS
from trainer.data.dataset import Dataset

ROWS = 4
WAYS = ("prepared", "streaming")


def batches(dataset: Dataset, count: int, position=None, **place):
    """Returns the first `count` pairs of a stream."""
    stream = dataset.train_stream(position, rows=ROWS, **place)
    try:
        return [next(stream) for _ in range(count)]
    finally:
        stream.close()


def assert_same(left, right) -> None:
    for (batch, position), (other, other_position) in zip(left, right, strict=True):
        assert set(batch) == {*FIELDS, "row"}
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)
        assert position == other_position


def assert_aligned(batch: dict[str, np.ndarray]) -> None:
    """Checks that every sequence begins at a multiple of TILE tokens, and that all fields are 0 between sequences."""
    segments, real = batch["inputs_segmentation"], batch["inputs_segmentation"] != 0
    _, begins = np.nonzero(real & (np.diff(segments, prepend=0) != 0))
    assert len(begins) >= real.any(axis=1).sum()
    assert not (begins % TILE).any()
    assert not any(batch[name][~real].any() for name in FIELDS)

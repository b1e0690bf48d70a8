"""Which checkpoints stay."""

import math

import ml_collections
import pytest

from trainer.checkpoint.retention import expired

LOSSES = {2: 3.0, 4: 1.0, 6: None, 8: 2.0, 10: None}


@pytest.mark.parametrize(
    ("newest", "period", "best", "gone"),
    [
        (None, 0, 0, []),
        (None, 4, 1, []),
        (1, 0, 0, [2, 4, 6, 8]),
        (3, 0, 0, [2, 4]),
        (5, 0, 0, []),
        (9, 0, 0, []),
        (1, 4, 0, [2, 6]),
        (1, 0, 1, [2, 6, 8]),
        (1, 0, 2, [2, 6]),
        (1, 0, 9, [6]),  # of those that were not evaluated none is among the best
        (1, 8, 1, [2, 6]),
    ],
)
def test_expired(newest, period, best, gone):
    names = ("max_num_checkpoints_to_keep", "checkpoint_keep_period", "keep_best_checkpoints")
    config = ml_collections.ConfigDict(dict(zip(names, (newest, period, best), strict=True)))
    assert expired(LOSSES, config) == gone
    assert expired({}, config) == []


def test_of_equal_losses_the_older_is_the_best():
    config = ml_collections.ConfigDict(
        {"max_num_checkpoints_to_keep": 1, "checkpoint_keep_period": 0, "keep_best_checkpoints": 1}
    )
    assert expired({1: 1.0, 2: 1.0, 3: math.inf, 4: None}, config) == [2, 3]

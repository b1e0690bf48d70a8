"""The permutation of each epoch: a bijection, uniform, and without memory proportional to the number of rows."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from trainer.data.batches import Batch, train_batch
from trainer.data.order import permuted

from .test_batches import Numbered


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return permuted(np.arange(size), size, seed=seed, epoch=epoch).tolist()


def test_the_order_of_a_seed_is_kept():
    assert order(8) == [2, 1, 6, 7, 0, 5, 3, 4]
    assert permuted(np.arange(3), 10**12 + 39, seed=7, epoch=1).tolist() == [883851087477, 993553461517, 731704851763]


def test_every_row_is_visited_once_whatever_their_number():
    for size in range(1, 300):
        assert sorted(order(size, seed=size)) == list(range(size))


@pytest.mark.parametrize("size", [10**6 + 3, 10**9 + 7, 2**40 + 1, 2**62])
def test_rows_of_a_large_source_are_distinct_and_in_range(size: int):
    images = permuted(np.arange(size - 10**5, size), size, seed=1, epoch=0)
    assert len(np.unique(images)) == 10**5
    assert images.min() >= 0
    assert images.max() < size
    # The standard error of the mean of n draws is size / sqrt(12 n). Five standard errors practically never occur.
    assert abs(images.mean() / size - 0.5) < 5 / math.sqrt(12 * len(images))


def test_a_row_does_not_depend_on_who_asks():
    whole = np.array(order(1000, seed=3, epoch=2))
    for indices in (np.array([999, 5, 5, 0]), np.arange(17, 40), np.zeros(0, np.int64)):
        assert permuted(indices, 1000, seed=3, epoch=2).tolist() == whole[indices].tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order(20, seed, epoch) for seed in (0, 1, 2**32, 2**32 + 1) for epoch in range(25)]
    assert len(set(map(tuple, orders))) == 100


def z_score(counts: np.ndarray, expected: float, freedom: int) -> float:
    """Returns how many standard deviations chi-square is from its mean. Seeds are fixed, so a value below 4 stays
    there."""
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_all_orders_of_four_rows_are_equally_likely():
    counts = Counter(tuple(order(4, seed)) for seed in range(24 * 60))
    assert abs(z_score(np.array([*counts.values()] + [0] * (24 - len(counts))), 60, 23)) < 4


@pytest.mark.parametrize("size", [17, 64])
def test_every_row_comes_equally_often_at_every_place(size: int):
    counts = np.zeros((size, size))
    following = np.zeros(size)
    for epoch in range(2000):
        images = np.array(order(size, seed=5, epoch=epoch))
        counts[np.arange(size), images] += 1
        following[np.diff(images) % size] += 1
    assert abs(z_score(counts, 2000 / size, (size - 1) ** 2)) < 4
    # The distance between a row and its predecessor: no distance is preferred.
    assert z_score(following[1:], following.sum() / (size - 1), size - 2) < 4


class Tenfold(Numbered):
    """A source with so many rows that their numbers would not fit in memory."""

    def rows(self, indices: np.ndarray) -> Batch:
        return super().rows(indices % 1000)


def test_a_billion_rows_start_at_once():
    train_batch(Tenfold(10**9), 0, 64, seed=0, shuffle=True)  # triggers late imports
    tracemalloc.start()
    try:
        for first in (0, 10**9 - 32, 7 * 10**9):  # the second spans two epochs
            train_batch(Tenfold(10**9), first, 64, seed=0, shuffle=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000  # bytes

"""The order of rows: a permutation for each epoch, computed index by index."""

import math

import numpy as np

VERSION = 2  # the version of this algorithm; positions saved with another version are refused
_ROUNDS = 10  # with only 6 rounds, a source of 6 rows gets some orders too frequently


def visited(indices: np.ndarray, size: int, *, seed: int, shuffle: bool) -> np.ndarray:
    """Returns the row numbers at `indices` [n] in the endless sequence of epochs over a source of `size` rows."""
    epochs, indices = np.divmod(indices, size)
    if shuffle:
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = permuted(indices[here], size, seed=seed, epoch=epoch)
    return indices


def permuted(indices: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the images of `indices` [n], int64, under the permutation of [0, size) for (seed, epoch).

    This is a generalized Feistel network (Black and Rogaway 2002). An index is a pair (left, right) with left < columns
    and right < rows, where columns * rows is at least `size`. Each round adds a hash of `right` to `left` modulo
    columns, and then a hash of `left` to `right` modulo rows. An image that is not below `size` goes through the
    network again (cycle walking). There are fewer than `columns` such images, so repetitions are few, and memory and
    time depend on n but not on `size`. The hash keys are raw words of Philox, which NumPy keeps stable across releases.
    """
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    keys = np.random.Philox(key=[seed, epoch]).random_raw(2 * _ROUNDS)
    images = np.array(indices, np.uint64)
    outside = np.ones(len(images), bool)
    while outside.any():
        left, right = np.divmod(images[outside], np.uint64(rows))
        for key_of_left, key_of_right in keys.reshape(_ROUNDS, 2):
            left = (left + _hash(right, key_of_left)) % np.uint64(columns)
            right = (right + _hash(left, key_of_right)) % np.uint64(rows)
        images[outside] = left * np.uint64(rows) + right
        outside = images >= size
    return images.astype(np.int64)


def _hash(half: np.ndarray, key: np.uint64) -> np.ndarray:
    return mix(half ^ key) >> np.uint64(1)  # 63 bits, so that adding `left` or `right` cannot overflow


def mix(words: np.ndarray) -> np.ndarray:
    """Applies one step of SplitMix64 (Steele, Lea, Flood 2014) to uint64 words, elementwise."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

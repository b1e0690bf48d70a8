"""The order of tokens when rows are sharded over devices."""

import numpy as np
import pytest

from trainer.ops.order import DUAL_CHUNK_SWAP, STRIPED, order, reorder, restored

STRATEGIES = DUAL_CHUNK_SWAP, STRIPED


def test_what_each_device_has():
    assert order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert order(8, 2, STRIPED).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_each_token_has_one_place_and_work_is_balanced(n, strategy):
    index = order(1024, n, strategy)
    assert sorted(index) == list(range(1024))
    pairs = (index + 1).reshape(n, -1).sum(axis=1)  # a token sees itself and its predecessors
    assert abs(pairs / pairs.mean() - 1).max() < 0.05


def test_striped_balances_documents():
    """The row has eight documents; those in its second half are longer."""
    position = np.concatenate([np.arange(length) for length in (64,) * 4 + (192,) * 4])
    pairs = (position + 1)[order(1024, 4, STRIPED)].reshape(4, -1).sum(axis=1)
    assert abs(pairs / pairs.mean() - 1).max() < 0.05


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_restored_is_the_inverse(strategy):
    batch = {"row": np.arange(3), "inputs": np.arange(24).reshape(3, 8), "ahead": np.arange(48).reshape(3, 8, 2)}
    moved = reorder(batch, 2, strategy)
    assert np.array_equal(moved["inputs"][0], order(8, 2, strategy))
    assert np.array_equal(moved["ahead"][..., 0] // 2, moved["inputs"])
    assert np.array_equal(moved["row"], batch["row"])
    back = restored(moved, 2, strategy)
    assert back.keys() == batch.keys()
    assert all(np.array_equal(back[name], x) for name, x in batch.items())


@pytest.mark.parametrize(("strategy", "length"), [(DUAL_CHUNK_SWAP, 12), (STRIPED, 10)])
def test_a_length_that_does_not_divide(strategy, length):
    with pytest.raises(ValueError, match=f"does not divide {length} tokens"):
        reorder({"inputs": np.zeros((1, length))}, 4, strategy)

"""Batches as a function of their first row, for any number of processes."""

import numpy as np
import pytest

from trainer.data.batches import FIELDS, Batch, eval_batches, make_batch, positions, train_batch


class Numbered:
    """A source whose row i contains i + 1 at every position."""

    length = 4

    def __init__(self, size: int | None):
        self.size = size

    def rows(self, indices: np.ndarray) -> Batch:
        assert self.size is None or (indices < self.size).all()
        values = np.repeat(indices[:, None] + 1, self.length, axis=1)
        return make_batch(values, values, np.ones_like(values))


def seen(source: Numbered, steps: int, rows: int, **settings) -> list[int]:
    """Returns the row numbers of `steps` batches."""
    batches = [train_batch(source, step * rows, rows, **settings) for step in range(steps)]
    return np.concatenate([batch["inputs"][:, 0] - 1 for batch in batches]).tolist()


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own():
    order = seen(Numbered(10), 5, 6, seed=3, shuffle=True)  # batches span epochs
    epochs = [order[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert order != seen(Numbered(10), 5, 6, seed=4, shuffle=True)


def test_without_shuffling_rows_come_in_order():
    assert seen(Numbered(5), 3, 4, seed=0, shuffle=False) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_an_endless_source_is_read_by_global_index():
    assert seen(Numbered(None), 3, 2, seed=0, shuffle=True) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_the_parts_of_all_processes_make_the_global_batch(processes: int):
    settings = {"seed": 1, "shuffle": True}
    whole = train_batch(Numbered(10), 84, 12, **settings)
    parts = [
        train_batch(Numbered(10), 84, 12, **settings, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    assert set(whole) == {*FIELDS, "row"}
    for name, values in whole.items():
        assert values.dtype == np.int32
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
    assert whole["row"].tolist() == list(range(12))


def test_rows_that_do_not_split_over_the_processes_are_refused():
    with pytest.raises(ValueError, match="5 rows do not split"):
        train_batch(Numbered(10), 0, 5, seed=0, shuffle=False, process_count=2)


@pytest.mark.parametrize("processes", [1, 4])
def test_evaluation_reads_every_row_once_and_pads_the_last_batch(processes: int):
    parts = [list(eval_batches(Numbered(9), 4, process_index=i, process_count=processes)) for i in range(processes)]
    batches = [{name: np.concatenate([p[name] for p in same]) for name in same[0]} for same in zip(*parts, strict=True)]
    assert [batch["inputs"].shape for batch in batches] == [(4, 4)] * 3
    assert np.concatenate([batch["inputs"][:, 0] for batch in batches]).tolist() == [*range(1, 10), 0, 0, 0]
    last = batches[-1]
    assert last["targets_segmentation"].any(axis=1).tolist() == [True, False, False, False]
    assert last["row"].tolist() == [0, 1, 2, 3]


def test_evaluation_stops_after_max_batches():
    assert len(list(eval_batches(Numbered(9), 4, 2))) == 2


def test_evaluation_of_an_endless_source_is_refused():
    with pytest.raises(ValueError, match="endless"):
        next(eval_batches(Numbered(None), 4))


def test_a_position_is_good_for_another_batch_size():
    whole = seen(Numbered(10), 6, 4, seed=2, shuffle=True)
    other = [train_batch(Numbered(10), 8 + 2 * i, 2, seed=2, shuffle=True)["inputs"][:, 0] - 1 for i in range(8)]
    assert np.concatenate(other).tolist() == whole[8:]


def test_targets_without_loss_are_not_padding():
    ones = np.ones((1, 4))
    batch = make_batch(ones, ones, np.array([[1, 1, 2, 0]]), np.array([[0, 1, 1, 0]]))
    assert batch["targets_segmentation"].tolist() == [[0, 1, 2, 0]]
    assert batch["inputs_segmentation"].tolist() == [[1, 1, 2, 0]]
    assert batch["inputs_position"].tolist() == [[0, 1, 0, 0]]


def test_positions_restart_with_each_segment():
    segmentation = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 3, 0, 0]])
    assert positions(segmentation).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 0, 0]]

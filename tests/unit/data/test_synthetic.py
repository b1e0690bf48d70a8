"""Rows as a function of their index."""

import numpy as np
import pytest
from support import tiny_config

from trainer.data.batches import train_batch
from trainer.data.dataset import open_dataset
from trainer.data.synthetic import SyntheticRows

SEED = {"seed": 5}


def test_a_row_depends_on_its_index_and_the_seed_alone():
    together = SyntheticRows(64, 100, **SEED).rows(np.arange(20))
    for i in (0, 7, 19):
        alone = SyntheticRows(64, 100, **SEED).rows(np.array([i]))
        assert all((together[name][i] == alone[name][0]).all() for name in together)
    assert (together["inputs"] != SyntheticRows(64, 100, seed=6).rows(np.arange(20))["inputs"]).any(axis=1).all()
    assert len(np.unique(together["inputs"], axis=0)) == 20


def test_evaluation_rows_are_not_training_rows():
    dataset = open_dataset(tiny_config("nnx", max_target_length=64, vocab_size=100), print)
    train, _ = next(dataset.train_stream(rows=200))
    held_out = dataset.evaluation.rows(np.arange(dataset.evaluation.size))
    assert not set(map(bytes, train["inputs"])) & set(map(bytes, held_out["inputs"]))


@pytest.mark.parametrize(("length", "vocab_size"), [(2, 2), (9, 3), (128, 4096), (300, 70000)])
def test_rows_exercise_packing(length: int, vocab_size: int):
    batch = train_batch(SyntheticRows(length, vocab_size, **SEED), 192, 64, seed=0, shuffle=True)
    segmentation, real = batch["targets_segmentation"], batch["targets_segmentation"] != 0
    assert batch["inputs"].shape == (64, length)
    assert {values.dtype for values in batch.values()} == {np.dtype(np.int32)}
    assert batch["targets"].min() >= 0
    assert batch["targets"].max() < vocab_size
    # Padding is at the end, ids count from 1 without gaps, and positions restart with each id.
    assert (real[:, :-1] >= real[:, 1:]).all()
    assert (segmentation[:, 0] == 1).all()
    assert set(np.diff(segmentation, axis=1)[real[:, 1:]].tolist()) == {0, 1}
    assert (
        (batch["inputs_position"] == 0)
        == ~real | np.pad(np.diff(segmentation) != 0, ((0, 0), (1, 0)), constant_values=True)
    ).all()
    if length >= 128:
        assert len(np.unique(segmentation.max(axis=1))) > 1
        assert not real.all()
        assert real.mean() > 0.9


def test_the_next_token_follows_from_the_last_within_a_segment():
    batch = SyntheticRows(64, 100, **SEED).rows(np.arange(32))
    same = (np.diff(batch["targets_segmentation"], axis=1) == 0) & (batch["targets_segmentation"][:, 1:] != 0)
    assert (batch["targets"][:, :-1][same] == batch["inputs"][:, 1:][same]).all()
    real = batch["targets_segmentation"] != 0
    assert ((batch["targets"] - batch["inputs"])[real] % 100 == 7).all()


def test_without_packing_a_row_is_one_segment():
    config = tiny_config("nnx", max_target_length=64, packing=False)
    batch, _ = next(open_dataset(config, print).train_stream(rows=32))
    assert set(np.unique(batch["inputs_segmentation"])) == {0, 1}
    assert (batch["inputs_segmentation"][:, 0] == 1).all()

"""Which checkpoints are kept."""

import math

import ml_collections
import pytest
from manager_cases import SIDECAR, settings, small_tree

from trainer.checkpoint.manager import CheckpointManager, newest
from trainer.checkpoint.retention import expired
from trainer.config.errors import UserError

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
        (1, 0, 9, [6]),  # checkpoints without an evaluation are never among the best
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


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"max_num_checkpoints_to_keep": 2}, [5, 6]),
        ({"max_num_checkpoints_to_keep": 1, "checkpoint_keep_period": 3}, [3, 6]),
        ({"max_num_checkpoints_to_keep": 1, "keep_best_checkpoints": 2}, [2, 4, 6]),
    ],
)
def test_retention(tmp_path, changes, kept):
    losses = {2: 1.0, 4: 2.0, 5: 3.0}
    with CheckpointManager(tmp_path, settings(**changes), say=print) as manager:
        for updates in range(1, 7):
            metrics = {"eval_loss": losses[updates]} if updates in losses else {}
            manager.save(updates, small_tree(), SIDECAR, metrics)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == kept


def test_a_process_killed_while_it_deletes_leaves_nothing_that_looks_damaged(tmp_path, monkeypatch):
    """The first action on an expired checkpoint is to rename it."""

    class Killed(BaseException):
        pass

    def rmtree(path):
        (path / "sums.json").unlink()
        raise Killed

    manager = CheckpointManager(tmp_path, settings(max_num_checkpoints_to_keep=1), say=print)
    manager.save(1, small_tree(), SIDECAR, {})
    manager.wait()
    monkeypatch.setattr("shutil.rmtree", rmtree)
    manager.save(2, small_tree(), SIDECAR, {})
    with pytest.raises(Killed):
        manager.close()
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1.expired", "2"}
    assert newest(tmp_path) == tmp_path / "checkpoints/2"
    lines = []
    with CheckpointManager(tmp_path, settings(max_num_checkpoints_to_keep=1), say=lines.append) as manager:
        assert manager.latest == 2
    assert lines == []
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2"}


def test_retention_goes_on_in_another_process(tmp_path):
    keeping = settings(max_num_checkpoints_to_keep=1, keep_best_checkpoints=1)
    for updates, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, None)):
        with CheckpointManager(tmp_path, keeping, say=print) as manager:
            manager.save(updates, small_tree(), SIDECAR, {} if loss is None else {"eval_loss": loss})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4"}
    (tmp_path / "checkpoints/2/run/metrics.json").write_text("{")
    with pytest.raises(UserError, match=r"checkpoints/2 is damaged: run/metrics\.json cannot be read"):
        CheckpointManager(tmp_path, keeping, say=print)

"""The warning about the first losses of a run that starts from a model."""

import pytest
from ml_collections import ConfigDict

from trainer.training.first_losses import UPDATES, FirstLosses


def warned(losses, begin=0, **paths):
    config = ConfigDict({"load_parameters_path": "", "load_full_state_path": "", "learning_rate": 6e-3} | paths)
    lines = []
    watch = FirstLosses(config, begin, lines.append)
    for i, loss in enumerate(losses):
        watch.add(begin + i, loss)
    return lines


def test_a_loss_that_multiplies_is_told_once():
    (line,) = warned([3.24, 11.96, 12.0], load_parameters_path="/m")
    assert line.startswith("warning: the loss rose from 3.24 to 11.96, 3.7 times the first, after 1 update: ")
    assert "learning_rate=0.006 is probably too high" in line
    (line,) = warned([0.5] * 3 + [1.6], begin=7, load_full_state_path="/r")
    assert "after 3 updates" in line
    (line,) = warned([0.0, 1.5], load_parameters_path="/m")  # as in reinforcement learning
    assert "from 0.00 to 1.50, after 1 update" in line


@pytest.mark.parametrize(
    "losses",
    [[0.2, 0.9], [3.0, 5.9], [0.0, 0.4], [float("nan"), 5.0], [2.0] * (UPDATES + 1) + [9.0]],
    ids=["batches differ", "no multiple", "around zero", "not a number", "later"],
)
def test_other_losses_are_not(losses):
    assert warned(losses, load_parameters_path="/m") == []


def test_a_run_from_nothing_is_not_watched():
    assert warned([3.0, 12.0]) == []

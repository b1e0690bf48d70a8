"""When a checkpoint is saved."""

import itertools

import ml_collections
import numpy as np
import pytest

from trainer.backends.base import TrainTree
from trainer.checkpoint.save import is_due, maybe_save_checkpoint


def config(**changes):
    values = {"steps": 10, "checkpoint_period": 4, "save_checkpoint_on_start": False}
    values |= {"ici_pipeline_parallelism": 1, "dcn_pipeline_parallelism": 1}
    return ml_collections.ConfigDict(values | {"save_checkpoint_on_completion": True} | changes)


class Manager:
    """Records its arguments."""

    def __init__(self, events, latest=None):
        self.events, self.latest = events, latest

    def save(self, updates, tree, sidecar, metrics):
        self.latest = updates
        self.events.append(("save", updates, tree, sidecar, dict(metrics)))


class Codec:
    """A codec whose native state is just the step."""

    def unpack(self, state):
        return TrainTree(np.int32(state), {}, (), {})


def attempt(updates, *, settings=None, latest=None, manager=True, **when):
    """Returns the recorded calls in order, and the return value."""
    events = []

    def before():
        events.append("before")
        return {"eval_loss": 1.0}

    begun = maybe_save_checkpoint(
        Manager(events, latest) if manager else None,
        updates,
        updates,
        config=config() if settings is None else settings,
        codec=Codec(),
        sidecar=lambda: "sidecar",
        before=before,
        **when,
    )
    return events, begun


SAVED = ["before", ("save", 4, Codec().unpack(4), "sidecar", {"eval_loss": 1.0})]


@pytest.mark.parametrize(
    ("changes", "initial", "due"),
    [
        # The update counts from 0 to 10 at which a save is due.
        ({}, False, [0, 4, 8, 10]),
        ({"save_checkpoint_on_completion": False}, False, [0, 4, 8]),
        ({"checkpoint_period": 5}, False, [0, 5, 10]),
        ({"checkpoint_period": 5, "save_checkpoint_on_completion": False}, False, [0, 5, 10]),
        ({"checkpoint_period": 100}, False, [0, 10]),
        ({"checkpoint_period": 100, "save_checkpoint_on_completion": False}, False, [0]),
        ({"checkpoint_period": 1}, False, list(range(11))),
        ({}, True, []),  # the initial state, at any update count
        ({"save_checkpoint_on_start": True}, True, list(range(11))),
    ],
)
def test_what_is_due(changes, initial, due):
    assert [n for n in range(11) if is_due(config(**changes), n, initial=initial)] == due


@pytest.mark.parametrize(("latest", "force"), list(itertools.product([None, 0, 3, 4], [False, True])))
@pytest.mark.parametrize("updates", [4, 5])
def test_when_it_saves(updates, latest, force):
    events, begun = attempt(updates, latest=latest, force=force)
    expected = latest != updates and (force or updates == 4)
    assert begun is expected
    assert [event[0] for event in events[1:]] == ["save"] * expected
    assert events[:1] == ["before"] * expected


def test_before_comes_before_and_all_is_handed_over():
    assert attempt(4) == (SAVED, True)


@pytest.mark.parametrize("on_start", [False, True])
def test_the_initial_state(on_start):
    for updates in (0, 4):
        _, begun = attempt(updates, settings=config(save_checkpoint_on_start=on_start), initial=True)
        assert begun is on_start


def test_no_number_is_saved_twice():
    events = []
    manager = Manager(events)
    for when in ({}, {"force": True}, {"initial": True}):
        settings = config(save_checkpoint_on_start=True)
        maybe_save_checkpoint(
            manager, 4, 4, config=settings, codec=Codec(), sidecar=lambda: "sidecar", before=dict, **when
        )
    assert [event[1] for event in events] == [4]


def test_without_a_manager_nothing_happens():
    assert attempt(4, manager=False, force=True) == ([], False)


def test_the_state_says_how_many_updates_it_holds():
    events = []
    given = {"config": config(), "codec": Codec(), "sidecar": lambda: "sidecar"}
    assert [n for n in range(11) if maybe_save_checkpoint(Manager(events), n, **given)] == [0, 4, 8, 10]
    assert [event[1] for event in events] == [0, 4, 8, 10]


def test_a_number_that_is_not_the_states_own_is_refused():
    events = []
    given = {
        "config": config(),
        "codec": Codec(),
        "sidecar": lambda: "sidecar",
        "before": lambda: events.append("before"),
    }
    with pytest.raises(ValueError, match="a checkpoint of 8 updates is due, but the state holds 7"):
        maybe_save_checkpoint(Manager(events), 7, 8, **given)
    assert events == []

"""Fixtures for the tests of checkpoints."""

import pytest


@pytest.fixture(autouse=True)
def loading_is_never_slow(monkeypatch):
    """Never prints the progress or duration of loading, so that output is the same on a busy machine."""
    monkeypatch.setattr("trainer.weights.load._SHORT", float("inf"))
    monkeypatch.setattr("trainer.leaves.source._EVERY", float("inf"))

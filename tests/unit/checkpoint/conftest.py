"""What tests of checkpoints share."""

import pytest


@pytest.fixture(autouse=True)
def loading_is_never_slow(monkeypatch):
    """Says nothing of how long it took, however busy the machine is."""
    monkeypatch.setattr("trainer.checkpoint.load._SHORT", float("inf"))

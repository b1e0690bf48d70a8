"""Engines of these tests draw tokens with few operations. test_sampling.py tests the usual ones."""

import pytest
from support import draw_simply


@pytest.fixture(autouse=True)
def simple_draws(monkeypatch):
    monkeypatch.setattr("trainer.inference.programs.draw", draw_simply)

"""Fixtures for the tests of checkpoints."""

import pytest


@pytest.fixture(autouse=True)
def loading_is_never_slow(monkeypatch):
    """Never prints the progress or duration of loading, so that output is the same on a busy machine."""
    monkeypatch.setattr("trainer.weights.load._SHORT", float("inf"))
    monkeypatch.setattr("trainer.leaves.source._EVERY", float("inf"))


@pytest.fixture(autouse=True, scope="module")
def equal_models():
    """Within a test file, models of equal configurations are traced once: a command builds the same model again and
    again. Not with a family that is patched under a name that another test uses for another family."""
    from trainer.backends.nnx_model import NNXModel

    begin, made = NNXModel.__init__, {}

    def shared(self, config):
        key = type(self), config
        if key not in made:
            begin(self, config)
            made[key] = self.__dict__
        self.__dict__ = made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NNXModel, "__init__", shared)
        yield

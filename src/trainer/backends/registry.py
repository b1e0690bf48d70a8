"""From the name of a combination to the model that serves it."""

import importlib

from trainer.backends.base import Model
from trainer.config import combination

# Imported late, so that what one combination needs is not loaded for another.
MODELS = {
    "nnx": "trainer.backends.nnx_model:NNXModel",
    "nnx_linen_decoder": "trainer.linen.model:NNXLinenDecoder",
    "bridged": "trainer.linen.model:Bridged",
    "bridged_linen_decoder": "trainer.linen.model:BridgedLinenDecoder",
    "linen": "trainer.linen.model:Linen",
}


def make_model(config) -> Model:
    """The model of the combination that a resolved configuration chooses."""
    module, _, name = MODELS[combination(config)].partition(":")
    return getattr(importlib.import_module(module), name)(config)

"""From the name of a combination to the backend that serves it."""

import importlib

import optax

from trainer.backends.base import Backend
from trainer.config import combination

# Imported late, so that what one combination needs is not loaded for another.
BACKENDS = {
    "nnx": "trainer.backends.nnx_backend:NNXBackend",
    "nnx_linen_decoder": "trainer.linen.backend:NNXLinenDecoder",
    "bridged": "trainer.linen.backend:Bridged",
    "bridged_linen_decoder": "trainer.linen.backend:BridgedLinenDecoder",
    "linen": "trainer.linen.backend:Linen",
}


def make_backend(config, tx: optax.GradientTransformation) -> Backend:
    """The backend of the combination that a resolved configuration chooses, for the optimizer `tx`."""
    module, _, name = BACKENDS[combination(config)].partition(":")
    return getattr(importlib.import_module(module), name)(config, tx)

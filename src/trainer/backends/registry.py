"""Creates the model for the configured combination of the flags that select NNX or Linen."""

import importlib

from trainer.backends.base import Model
from trainer.config.flags import combination
from trainer.config.keys import Config
from trainer.models.families import check_products
from trainer.ops.paths import by_name

# The modules are imported only when they are used, so that no combination loads the dependencies of another.
MODELS = {
    "nnx": "trainer.backends.nnx_model:NNXModel",
    "nnx_linen_decoder": "trainer.linen.model:NNXLinenDecoder",
    "bridged": "trainer.linen.model:Bridged",
    "bridged_linen_decoder": "trainer.linen.model:BridgedLinenDecoder",
    "linen": "trainer.linen.model:Linen",
}


def make_model(config: Config) -> Model:
    """Returns the model for a resolved configuration.

    Raises:
      UserError: a block has no parameters or unsupported variables, or one of the model family's rules for products
        matches no parameter.
    """
    module, _, name = MODELS[combination(config)].partition(":")
    model: Model = getattr(importlib.import_module(module), name)(config)
    check_products(config, list(by_name(model.abstract[0])))
    return model

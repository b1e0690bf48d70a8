"""Makes the model of a combination from its name."""

import importlib

from trainer.backends.base import Model
from trainer.config import Config, combination
from trainer.models.families import check_products
from trainer.models.matrices import masked_kernels, quantized_names
from trainer.ops.paths import by_name
from trainer.sharding import LAYERS

# Imported on use, so that one combination does not load the dependencies of another.
MODELS = {
    "nnx": "trainer.backends.nnx_model:NNXModel",
    "nnx_linen_decoder": "trainer.linen.model:NNXLinenDecoder",
    "bridged": "trainer.linen.model:Bridged",
    "bridged_linen_decoder": "trainer.linen.model:BridgedLinenDecoder",
    "linen": "trainer.linen.model:Linen",
}


def make_model(config: Config) -> Model:
    """Returns the model of the combination of a resolved configuration.

    Raises:
      UserError: a block or rules for products are invalid.
    """
    module, _, name = MODELS[combination(config)].partition(":")
    model: Model = getattr(importlib.import_module(module), name)(config)
    check_products(config, list(by_name(model.abstract[0])))
    quantized_names(config)
    masked_kernels(config)
    return model


def quantized_and_float(model: Model) -> tuple[list[str], list[str]]:
    """Returns the canonical names of the matrices whose products are quantized, and of the other matrices, including
    tables that are looked up."""
    quantized = quantized_names(model.config)
    axes = {name: [axis for axis in names if axis != LAYERS] for name, names in by_name(model.param_axes).items()}
    matrices = [name for name, names in axes.items() if len(names) > 1 and not name.endswith("/bias")]
    return quantized, [name for name in matrices if name not in quantized]

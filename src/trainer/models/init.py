"""Initial parameters, which are the same whether the model and its blocks are NNX or Linen modules."""

import jax
from flax import nnx

from trainer.config.capabilities.pipeline_keys import unpipelined
from trainer.config.keys import Config
from trainer.models.families import stacks
from trainer.models.stages import to_stages
from trainer.models.transformer import Decoder, Transformer


def init_variables(config: Config, key: jax.Array, decoder: type[Decoder] = Decoder) -> tuple[dict, dict]:
    """Returns the initial parameters and the other variables, as two nested dicts by canonical name.

    jit can trace this function. The values are the same with and without a pipeline.
    """
    model = Transformer(unpipelined(config), nnx.Rngs(params=key), decoder)
    variables = (nnx.to_pure_dict(part) for part in nnx.state(model, nnx.Param, nnx.Not(nnx.Param)))
    params, rest = to_stages(stacks(config), tuple(variables))
    return params, rest

"""Initial parameters, the same for every combination."""

import jax
from flax import nnx

from trainer.config.capabilities.pipeline_keys import unpipelined
from trainer.config.keys import Config
from trainer.models.families import stacks
from trainer.models.stages import to_stages
from trainer.models.transformer import Decoder, Transformer


def init_variables(config: Config, key: jax.Array, decoder: type[Decoder] = Decoder) -> tuple[dict, dict]:
    """Returns initial (params, rest): nested dicts of canonical names. Can be traced by jit.

    The values do not depend on a pipeline.
    """
    model = Transformer(unpipelined(config), nnx.Rngs(params=key), decoder)
    variables = (nnx.to_pure_dict(part) for part in nnx.state(model, nnx.Param, nnx.Not(nnx.Param)))
    params, rest = to_stages(stacks(config), tuple(variables))
    return params, rest

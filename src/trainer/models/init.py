"""Initial parameters, the same for every combination."""

import jax
from flax import nnx

from trainer.config import Config
from trainer.models.transformer import Decoder, Transformer


def init_variables(config: Config, key: jax.Array, decoder: type[Decoder] = Decoder) -> tuple[dict, dict]:
    """Returns initial (params, rest): nested dicts of canonical names, with layers on axis 0. Can be traced by jit."""
    model = Transformer(config, nnx.Rngs(params=key), decoder)
    params, rest = nnx.state(model, nnx.Param, nnx.Not(nnx.Param))
    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

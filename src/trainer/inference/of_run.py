"""Generation during training: makes an engine on the mesh of a `training.Run`, and the parameters for this engine."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.backends.registry import make_model
from trainer.config.capabilities.pipeline_keys import unpipelined
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.inference.engine import Engine
from trainer.inference.served import Served, for_decoding, row_parts
from trainer.models.caches import takes_cache
from trainer.models.families import stacks
from trainer.models.stages import to_layers


def engine_of_run(run: Any, slots: int, **own: Any) -> Engine:
    """Returns an engine for the model of `run`.

    Args:
      slots: the number of slots, which is rounded up to a multiple of the number of devices that share the slots.
      own: configuration keys that override the run's configuration.

    Raises:
      UserError: the model cannot generate text, or the mesh does not allow batch_invariant.
    """
    config, mesh = run.config, run.mesh
    if not takes_cache(config):
        raise UserError(f"decoder_block={config.decoder_block} has no init_cache: the model cannot generate text")
    if config.batch_invariant and mesh.shape["fsdp"] > 1:
        raise UserError(
            f"batch_invariant=true: fsdp has {mesh.shape['fsdp']} devices, which would share the one row of a "
            "prompt; set ici_fsdp_parallelism=1 ici_data_parallelism=-1"
        )
    decoding = for_decoding(Config({**unpipelined(config), **own}), mesh.devices.flat[0].platform)
    parts = row_parts(mesh, run.rules)
    return Engine(Served(decoding, mesh, run.rules, make_model(decoding), -(-slots // parts) * parts))


def trained_variables(run: Any) -> Callable[[Any], tuple[Any, Any]]:
    """Returns a function that maps the native train state of `run` to the variables (params, rest) for evaluation.

    With `ema_decay`, params are the averages. The layers of the result are not divided into pipeline stages.
    """

    def variables(state: Any) -> tuple[Any, Any]:
        params, rest = run.computation.trained(run.codec.unpack(state))
        params = jax.lax.with_sharding_constraint(params, run.param_shardings.compute)
        return to_layers(stacks(run.config), (params, rest))

    return run.sharded(variables)

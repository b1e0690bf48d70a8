"""Builds a `Run` from a configuration and devices; shared by training and the ahead-of-time tools."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from trainer.backends.base import StateCodec, TrainTree
from trainer.backends.registry import make_model
from trainer.config.capabilities.pipeline_keys import ONCE
from trainer.config.errors import UserError, report
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.models.families import axis_rules
from trainer.models.matrices import check_matrices
from trainer.models.remat import check_offload
from trainer.objectives.base import Objective, unread
from trainer.objectives.registry import make_objective as objective_of
from trainer.ops.inexact import inexact
from trainer.ops.paths import by_name
from trainer.optim.average import averaged
from trainer.optim.optimizer import make_optimizer, trainable
from trainer.optim.rules import Rule, with_rules
from trainer.sharding import Rules, hardware, make_mesh, memory_kinds, on_mesh, spec
from trainer.state.builders import set_named_sharding_nnx
from trainer.state.host import Fetch, check_host_memory, fetcher, storage_shardings
from trainer.state.init import init_state_fn
from trainer.state.shardings import ParamShardings, gathered_stages, state_shardings, tensors
from trainer.state.tolerance import check_tolerance
from trainer.training.diloco import rules_of_islands, with_islands
from trainer.training.frozen import frozen_arrays
from trainer.training.metrics import read_metrics
from trainer.training.rules import make_rules
from trainer.training.run import Computation, Run, States, batch_shardings, with_steps
from trainer.training.step import make_update
from trainer.training.teacher import make_teacher


def build(
    config: Config,
    devices: Sequence[jax.Device],
    update_rules: Sequence[Rule] = (),
    make_objective: Callable[..., Objective] = objective_of,
) -> Run:
    """Resolves `config` for `devices`, and returns a `Run` with the mesh, the model, the codec, the shardings and the
    steps.

    Args:
      config: from `config.load`, resolved or not.
      devices: all devices of the mesh.
      update_rules: further update rules, applied in order after the optimizer and the update rules of `config`.
      make_objective: makes the objective of training and evaluation from the resolved configuration, the model and,
        with use_distill, the teacher.

    Raises:
      UserError: the configuration does not fit the devices. The message lists all mistakes.
    """
    config = _resolved(config, devices)
    check_matrices(config)
    mesh, teacher = make_mesh(config, devices), None
    own: Rules = axis_rules(config)
    if config.use_distill:
        teacher, own = make_teacher(config, devices, own)
    inside, rules = rules_of_islands(own) if config.enable_diloco else (own, own)
    model = make_model(config)
    update_rules = make_rules(config, model, update_rules)
    _check_trained(config, model.abstract[0])
    codec = StateCodec(model, with_rules(make_optimizer(config, model.param_axes), update_rules))
    objective = make_objective(config, model) if teacher is None else make_objective(config, model, teacher)
    if wrong := unread(objective, config):
        raise report(wrong)

    abstract, named = codec.abstract, tensors(model, codec.abstract)
    zero1 = config.shard_optimizer_over_data
    on_device = state_shardings(model, abstract, mesh, rules, zero1=zero1)
    check_tolerance(named, abstract, on_device, config.sharding_tolerance)
    computing = state_shardings(model, abstract, mesh, rules) if zero1 else on_device
    if config[ONCE]:
        computing = gathered_stages(named, computing)
    params = ParamShardings(codec.unpack(on_device).params, codec.unpack(computing).params)
    update = make_update(config, codec.tx, objective, params, update_rules, model.param_axes)
    states = _states(config, codec, named, on_device)
    computation = Computation(
        update=on_mesh(mesh, inside)(update),
        trained=functools.partial(_trained, states.fetch, bool(config.ema_decay)),
        metric_shardings=NamedSharding(mesh, spec([], rules)),
        read=functools.partial(read_metrics, config),
    )
    if config.enable_diloco:
        states, computation = with_islands(config, mesh, params.storage, states, computation)
    batches, frozen = batch_shardings(objective, mesh, rules), frozen_arrays(objective, mesh, rules)
    return with_steps(Run(config, mesh, rules, objective, params, batches, frozen, states, computation))


def _states(config: Config, codec: StateCodec, named: Any, on_device: Any) -> States:
    """Returns the `States` of one model. `named`: the result of `state.shardings.tensors`; `on_device`: the shardings
    of the state before host offload."""
    stored = storage_shardings(config, codec.model, codec.abstract, on_device)
    fetch = fetcher(config, codec.unpack(on_device))
    return States(
        codec=codec,
        tensors=named,
        shardings=stored,
        init=init_state_fn(codec, stored, config.init_weights_seed, fetch),
        fetch=fetch,
        one=codec.unpack(set_named_sharding_nnx(codec.abstract, stored)),
        first=lambda tree: tree._replace(opt_state=None),
        from_one=codec.pack,
    )


def _trained(fetch: Fetch, averages: bool, tree: TrainTree) -> tuple[Any, Any]:
    """Implements `Computation.trained`. `averages`: whether the optimizer state contains parameter averages."""
    tree = fetch(tree if averages else tree._replace(opt_state=None))
    return averaged(tree), tree.rest


def _check_trained(config: Config, params: Any) -> None:
    kinds, is_trained = by_name(params), by_name(trainable(config)(params))
    if names := [name for name, leaf in kinds.items() if is_trained[name] and not _has_gradient(leaf)]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        floats = "; checkpoint_is_quantized=false reads them as floats" if config.checkpoint_is_quantized else ""
        raise UserError(
            f"{names[0]}{more}: integers and 8-bit floats cannot be trained: set trainable_parameters_mask to "
            f"patterns that match only other parameters, such as [embedding,norm]{floats}"
        )


def _has_gradient(leaf: Any) -> bool:
    return bool(inexact(leaf)[0]) and leaf.dtype.itemsize > 1


def _resolved(config: Config, devices: Sequence[jax.Device]) -> Any:
    """Returns `config`, resolved and checked for `devices`."""
    config = resolve(config, **hardware(devices))
    kinds = memory_kinds(devices)
    check_offload(config, kinds)
    check_host_memory(config, kinds)
    return config

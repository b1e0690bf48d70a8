"""From a configuration and devices to everything that runs, the same for training and for ahead-of-time tools."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from trainer.backends import Model, StateCodec, make_model
from trainer.config import eval_batch_rows, global_batch_rows, resolve
from trainer.models.families import axis_rules, forward_flops_per_token
from trainer.models.remat import check_offload
from trainer.objectives import Objective, batch_fields
from trainer.objectives import make_objective as objective_of
from trainer.optim import Rule, make_optimizer, trainable, with_rules
from trainer.sharding import Rules, make_mesh, on_mesh, slice_count, spec
from trainer.state import (
    ParamShardings,
    check_tolerance,
    init_state_fn,
    set_named_sharding_nnx,
    state_shardings,
    table,
    tensors,
)
from trainer.state.host import Fetch, check_host_memory, fetcher, storage_shardings
from trainer.training.evaluate import make_evaluation
from trainer.training.rules import make_rules
from trainer.training.step import make_update

# The logical axes of a batch's sizes (`objectives.Field`).
_AXES: dict[str | int, str] = {"rows": "activation_batch", "length": "activation_length"}

_LENGTHS = ("activation_length", "activation_norm_length", "activation_q_length", "activation_kv_length")


class Run(NamedTuple):
    """What a configuration defines on given devices. Functions are jitted; nothing is allocated or compiled yet."""

    config: Any  # resolved and frozen
    mesh: Mesh
    rules: Rules
    codec: StateCodec
    objective: Objective
    state_shardings: Any  # of the native train state between steps, a tree of its structure
    param_shardings: ParamShardings
    batch_shardings: dict[str, NamedSharding]
    init: Callable[..., Any]  # (params=None) -> native train state at step 0, sharded; see `init_state_fn`
    fetch: Fetch  # inside of jit: moves the parts of a TrainTree in host memory to the device
    update: Callable[..., Any]  # (tree, batch) -> (tree, metrics), not jitted; see `make_update`
    step: Any  # jitted (state, batch) -> (state, metrics): `update` of a native train state, which is donated
    eval_step: Any  # jitted (state, batch, bytes per token [vocab]) -> sums

    @property
    def model(self) -> Model:
        """The model."""
        return self.codec.model

    @property
    def abstract_state(self) -> Any:
        """The native train state, with a ShapeDtypeStruct at each leaf."""
        return self.codec.abstract

    @property
    def replicated(self) -> NamedSharding:
        """The replicated sharding."""
        return NamedSharding(self.mesh, spec([], self.rules))

    def abstract_args(self) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
        """The arguments of `step`, as shapes with shardings."""
        return set_named_sharding_nnx(self.abstract_state, self.state_shardings), self.abstract_batch(self.rows)

    def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of `rows` rows, as shapes with shardings."""
        sizes: dict[str | int, Any] = {"rows": rows, "length": self.config.max_target_length}
        return {
            name: jax.ShapeDtypeStruct(
                [sizes.get(size, size) for size in field.shape], field.dtype, sharding=self.batch_shardings[name]
            )
            for name, field in batch_fields(self.objective).items()
        }

    @property
    def rows(self) -> int:
        """Rows of the global batch of one update."""
        return global_batch_rows(self.config)

    @property
    def eval_rows(self) -> int:
        """Rows of an evaluation batch."""
        return eval_batch_rows(self.config)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._params))

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of one training step for one token; see `models.families.forward_flops_per_token`."""
        return 3 * forward_flops_per_token(self.config, self._params)

    @property
    def _params(self) -> Any:
        return self.codec.unpack(self.abstract_state).params

    def table(self) -> dict[str, Any]:
        """The shardings of the train state as plain data: mesh axes of size > 1, a row per tensor, totals, warnings."""
        trees = tensors(self.model, self.abstract_state), self.abstract_state, self.state_shardings
        rows = table.rows(*trees)
        named, abstract, _ = (self.codec.unpack(tree).params for tree in trees)
        computing = table.rows(named, abstract, self.param_shardings.compute)
        trained = trainable(self.config)({row["name"]: 0 for row in rows if row["name"].startswith("params/")})
        names = [name for name, is_trained in trained.items() if is_trained]
        gradients = table.gradient_rows(*trees, names, self.config.grad_dtype)
        axes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        totals = table.totals([*rows, *gradients])
        return {"mesh": axes, "tensors": rows, "totals": totals, "warnings": table.disagreements(computing)}

    def compile(self) -> Any:
        """The compiled training step."""
        return self.step.lower(*self.abstract_args()).compile()

    @property
    def step_on_leaves(self) -> Any:
        """`step` that takes and returns the leaves of the state as a list: flattening an `nnx.State` is slow."""
        structure: Any = jax.tree.structure(self.abstract_state)  # its stubs lack unflatten
        step = self.step.__wrapped__

        @functools.wraps(step)
        def on_leaves(leaves: list[Any], batch: Any) -> Any:
            state, metrics = step(structure.unflatten(leaves), batch)
            return jax.tree.leaves(state), metrics

        return _jitted(on_leaves, jax.tree.leaves(self.state_shardings), self.batch_shardings, self.replicated)

    def compile_on_leaves(self) -> Any:
        """The compiled `step_on_leaves`."""
        state, batch = self.abstract_args()
        return self.step_on_leaves.lower(jax.tree.leaves(state), batch).compile()

    def sharded(self, fn: Callable[..., Any], *, whole_rows: bool = False) -> Callable[..., Any]:
        """`fn`, whose layers shard their arrays over this run's mesh when it is traced.

        With `whole_rows` no mesh axis shards the length of a row, as sampling token by token requires.
        """
        whole = dict.fromkeys(_LENGTHS, ()) if whole_rows else {}
        return _sharded(fn, self.mesh, {**self.rules, **whole})


def build(
    config,
    devices: Sequence[jax.Device],
    update_rules: Sequence[Rule] = (),
    make_objective: Callable[[Any, Model], Objective] = objective_of,
) -> Run:
    """Resolve `config` for `devices`, and make mesh, model, codec, shardings and steps.

    Args:
      config: from `config.load`, resolved or not.
      devices: all devices of the mesh.
      update_rules: applied after the optimizer and the rules of `config`, in order.
      make_objective: makes the objective of training and evaluation from the resolved configuration and the model.

    Raises:
      UserError: the configuration does not fit the devices; all mistakes at once.
    """
    config = _resolved(config, devices)
    mesh, rules = make_mesh(config, devices), axis_rules(config)
    model = make_model(config)
    update_rules = make_rules(config, model, update_rules)
    codec = StateCodec(model, with_rules(make_optimizer(config, model.param_axes), update_rules))
    abstract = codec.abstract
    objective = make_objective(config, model)

    zero1 = config.shard_optimizer_over_data
    on_device = state_shardings(model, abstract, mesh, rules, zero1=zero1)
    check_tolerance(tensors(model, abstract), abstract, on_device, config.sharding_tolerance)
    computing = state_shardings(model, abstract, mesh, rules) if zero1 else on_device
    params = ParamShardings(codec.unpack(on_device).params, codec.unpack(computing).params)
    stored = storage_shardings(config, model, abstract, on_device)
    fetch = fetcher(config, codec.unpack(on_device))
    batch = _batch_shardings(objective, mesh, rules)
    replicated = NamedSharding(mesh, spec([], rules))

    update = make_update(config, codec.tx, objective, params, update_rules, model.param_axes)
    update = _sharded(update, mesh, rules)
    evaluation = _sharded(make_evaluation(objective, params), mesh, rules)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        tree, metrics = update(fetch(codec.unpack(state)), batch)
        return codec.pack(tree), metrics

    def eval_step(state: Any, *args: Any) -> Any:
        return evaluation(fetch(codec.unpack(state)), *args)

    return Run(
        config=config,
        mesh=mesh,
        rules=rules,
        codec=codec,
        objective=objective,
        state_shardings=stored,
        param_shardings=params,
        batch_shardings=batch,
        init=init_state_fn(codec, stored, config.init_weights_seed, fetch),
        fetch=fetch,
        update=update,
        step=_jitted(step, stored, batch, replicated),
        eval_step=jax.jit(eval_step, in_shardings=(stored, batch, replicated), out_shardings=replicated),
    )


def _resolved(config: Any, devices: Sequence[jax.Device]) -> Any:
    """`config`, resolved and checked for `devices`."""
    platform, slices = devices[0].platform, slice_count(devices)
    config = resolve(config, device_count=len(devices), platform=platform, num_slices=slices)
    memory_kinds = [memory.kind for memory in devices[0].addressable_memories()]
    check_offload(config, memory_kinds)
    check_host_memory(config, memory_kinds)
    return config


def _batch_shardings(objective: Objective, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    return {
        name: NamedSharding(mesh, spec([_AXES.get(size) for size in field.shape], rules))
        for name, field in batch_fields(objective).items()
    }


def _jitted(step: Callable[..., Any], state: Any, batch: Any, metrics: Any) -> Any:
    return jax.jit(step, in_shardings=(state, batch), out_shardings=(state, metrics), donate_argnums=0)


def _sharded(fn: Callable[..., Any], mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    @functools.wraps(fn)
    def on_this_mesh(*args: Any) -> Any:
        with on_mesh(mesh, rules):
            return fn(*args)

    return on_this_mesh

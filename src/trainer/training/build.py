"""From a configuration and devices to everything that runs, the same for training and for ahead-of-time tools."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from trainer.backends import Model, StateCodec, make_model
from trainer.config import eval_batch_rows, global_batch_rows, resolve
from trainer.data import FIELDS
from trainer.layers.sown import Total
from trainer.models.families import axis_rules, forward_flops_per_token
from trainer.models.remat import check_offload
from trainer.objectives import Objective
from trainer.optim import make_optimizer, trainable
from trainer.sharding import Rules, make_mesh, on_mesh, slice_count, spec
from trainer.state import (
    check_tolerance,
    init_state_fn,
    set_named_sharding_nnx,
    state_shardings,
    table,
    tensors,
)
from trainer.state.host import Fetch, check_host_memory, fetched, fetcher, waiting_shardings
from trainer.training.evaluate import make_eval_step
from trainer.training.step import Layout, make_train_step

_LENGTHS = ("activation_length", "activation_norm_length", "activation_q_length", "activation_kv_length")


class Run(NamedTuple):
    """What a configuration means on some devices. Functions are jitted; nothing has been allocated or compiled."""

    config: Any  # resolved and frozen
    mesh: Mesh
    rules: Rules
    model: Model
    codec: StateCodec
    abstract_state: Any  # the native train state, a ShapeDtypeStruct at each leaf
    state_shardings: Any  # in a tree of exactly the same structure: between steps
    compute_shardings: Any  # another, while the model computes: under Zero-1 it has the parameters whole over data
    batch_shardings: dict[str, NamedSharding]
    replicated: NamedSharding
    init: Callable[..., Any]  # (params=None) -> native train state at step 0, sharded; see `init_state_fn`
    step: Any  # jitted (state, batch) -> (state, metrics), the state donated
    step_on_leaves: Any  # the same of the state's leaves, a list: whoever calls it again and again takes it apart once
    eval_step: Any  # jitted (state, batch, bytes per token [vocab]) -> sums
    fetch: Fetch  # for inside of jit: a TrainTree with what waits in the host's memory brought to the device

    def abstract_args(self) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
        """The arguments of `step`, as shapes with shardings."""
        return set_named_sharding_nnx(self.abstract_state, self.state_shardings), self.abstract_batch(self.rows)

    def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of `rows` rows, as shapes with shardings."""
        shapes = dict.fromkeys(FIELDS, (rows, self.config.max_target_length)) | {"row": (rows,)}
        return {
            name: jax.ShapeDtypeStruct(shape, "int32", sharding=self.batch_shardings[name])
            for name, shape in shapes.items()
        }

    @property
    def layout(self) -> Layout:
        """Where the parameters live, between steps and during one."""
        return _layout(self.codec, self.state_shardings, self.compute_shardings)

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
        """Where the train state lives, as plain data: mesh axes above 1, a row for each tensor, totals and warnings."""
        trees = tensors(self.model, self.abstract_state), self.abstract_state, self.state_shardings
        rows = table.rows(*trees)
        computing = table.rows(*trees[:2], self.compute_shardings)
        trained = trainable(self.config)({row["name"]: 0 for row in rows if row["name"].startswith("params/")})
        names = [name for name, is_trained in trained.items() if is_trained]
        gradients = table.gradient_rows(*trees, names, self.config.grad_dtype)
        axes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        totals = table.totals([*rows, *gradients])
        return {"mesh": axes, "tensors": rows, "totals": totals, "warnings": table.disagreements(computing)}

    def compile(self) -> Any:
        """The compiled training step."""
        return self.step.lower(*self.abstract_args()).compile()

    def compile_on_leaves(self) -> Any:
        """The compiled `step_on_leaves`. Taking an `nnx.State` apart walks over each Variable, in Python."""
        state, batch = self.abstract_args()
        return self.step_on_leaves.lower(jax.tree.leaves(state), batch).compile()

    def placed(self, fn: Callable[..., Any], *, whole_rows: bool = False) -> Callable[..., Any]:
        """`fn`, whose layers place their arrays on this run's mesh when it is traced.

        With `whole_rows` no mesh axis splits the tokens of a row, as for a row that is made token by token.
        """
        whole = dict.fromkeys(_LENGTHS, ()) if whole_rows else {}
        return _placed(fn, self.mesh, {**self.rules, **whole})


def build(config, devices: Sequence[jax.Device]) -> Run:
    """Resolve `config` for `devices`, and make mesh, model, codec, shardings and steps.

    Raises:
      UserError: the configuration does not fit the devices; all mistakes at once.
    """
    platform, slices = devices[0].platform, slice_count(devices)
    config = resolve(config, device_count=len(devices), platform=platform, num_slices=slices)
    memory_kinds = [memory.kind for memory in devices[0].addressable_memories()]
    check_offload(config, memory_kinds)
    check_host_memory(config, memory_kinds)
    mesh = make_mesh(config, devices)
    rules = axis_rules(config)
    model = make_model(config)
    codec = StateCodec(model, make_optimizer(config, model.param_axes))
    abstract = codec.abstract
    capture = (Total,) if config.record_internal_nn_metrics else ()
    objective = Objective(model.apply, config.z_loss_multiplier, capture)

    shardings = state_shardings(model, abstract, mesh, rules, zero1=config.shard_optimizer_over_data)
    check_tolerance(tensors(model, abstract), abstract, shardings, config.sharding_tolerance)
    during = _during(config, model, codec, abstract, shardings, rules)
    layout = _layout(codec, shardings, during)
    waiting = waiting_shardings(config, model, abstract, shardings)
    fetch = fetcher(config, codec.unpack(shardings))
    rows = NamedSharding(mesh, spec(["activation_batch"], rules))
    table = NamedSharding(mesh, spec(["activation_batch", "activation_length"], rules))
    batch_shardings = dict.fromkeys(FIELDS, table) | {"row": rows}
    replicated = NamedSharding(mesh, spec([], rules))

    train_step = _placed(fetched(make_train_step(config, codec, objective, layout), codec, fetch), mesh, rules)
    step, step_on_leaves = (
        jax.jit(fn, in_shardings=(at, batch_shardings), out_shardings=(at, replicated), donate_argnums=0)
        for fn, at in ((train_step, waiting), (_on_leaves(train_step, abstract), jax.tree.leaves(waiting)))
    )
    eval_objective = objective._replace(z_loss_multiplier=0.0, capture=())
    eval_step = jax.jit(
        _placed(fetched(make_eval_step(codec, eval_objective, layout.during), codec, fetch), mesh, rules),
        in_shardings=(waiting, batch_shardings, replicated),
        out_shardings=replicated,
    )
    init = init_state_fn(codec, waiting, config.init_weights_seed, fetch)
    return Run(
        config,
        mesh,
        rules,
        model,
        codec,
        abstract,
        waiting,
        during,
        batch_shardings,
        replicated,
        init,
        step,
        step_on_leaves,
        eval_step,
        fetch,
    )


def _during(config, model: Model, codec: StateCodec, abstract: Any, shardings: Any, rules: Rules) -> Any:
    """The state's shardings while a step computes."""
    if not config.shard_optimizer_over_data:
        return shardings
    mesh = jax.tree.leaves(shardings)[0].mesh
    params = codec.unpack(state_shardings(model, abstract, mesh, rules)).params
    return codec.pack(codec.unpack(shardings)._replace(params=params))


def _layout(codec: StateCodec, between: Any, during: Any) -> Layout:
    return Layout(codec.unpack(between).params, codec.unpack(during).params)


def _on_leaves(step: Callable[..., Any], abstract: Any) -> Callable[..., Any]:
    structure: Any = jax.tree.structure(abstract)  # its stubs lack unflatten

    @functools.wraps(step)
    def on_leaves(leaves: list[Any], batch: Any) -> Any:
        state, metrics = step(structure.unflatten(leaves), batch)
        return jax.tree.leaves(state), metrics

    return on_leaves


def _placed(fn: Callable[..., Any], mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    @functools.wraps(fn)
    def on_this_mesh(*args: Any) -> Any:
        with on_mesh(mesh, rules):
            return fn(*args)

    return on_this_mesh

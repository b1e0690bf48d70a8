"""Everything that a configuration runs on given devices, not yet compiled."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from trainer.backends import Codec, Model
from trainer.config import Config, eval_batch_rows, eval_parts, global_batch_rows
from trainer.models.families import forward_flops_per_token
from trainer.objectives import Objective, batch_fields
from trainer.ops.paths import by_name
from trainer.optim import trainable
from trainer.sharding import Rules, on_mesh, spec
from trainer.state import ParamShardings, set_named_sharding_nnx, table
from trainer.state.host import Fetch
from trainer.training.evaluate import make_evaluation

# The logical axes of the sizes of a batch's arrays (`objectives.Field`).
_AXES: dict[str | int, str] = {"rows": "activation_batch", "length": "activation_length"}

_LENGTHS = ("activation_length", "activation_norm_length", "activation_q_length", "activation_kv_length")


class Run(NamedTuple):
    """Everything that a configuration runs on given devices. Functions are jitted; nothing is allocated or compiled."""

    config: Config  # resolved and frozen
    mesh: Mesh
    rules: Rules
    codec: Codec
    island: Any  # with DiLoCo the Run of one island, without steps; else None
    tensors: Any  # a `state.Tensor` for every leaf of the native train state
    objective: Objective
    state_shardings: Any  # storage shardings of the native train state, a tree with its structure
    param_shardings: ParamShardings
    batch_shardings: dict[str, NamedSharding]
    init: Callable[..., Any]  # (params=None, rest=None) -> native train state at step 0, sharded; see `init_state_fn`
    fetch: Fetch  # under jit: moves the parts of a canonical train state that are in host memory to the device
    trained: Callable[[Any], tuple[Any, Any]]  # under jit: (params, rest) for evaluation and sampling
    update: Callable[..., Any]  # (tree, batch) -> (tree, metrics), not jitted; see `make_update`
    metric_shardings: Any  # shardings of the metrics of an update, a prefix of their tree
    read: Callable[[Any, int], dict[str, Any]]  # (metrics, step) -> the metrics of that step on the host
    step: Any = None  # jitted (state, batch) -> (state, metrics): `update` of a native train state, which is donated
    eval_step: Any = None  # jitted (state, batch, bytes per token [vocab]) -> sums

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
        """Returns the arguments of `step` as shapes with shardings."""
        return set_named_sharding_nnx(self.abstract_state, self.state_shardings), self.abstract_batch(self.rows)

    def parts(self) -> dict[str, Any]:
        """Returns the arguments of `step` by kind, for `aot.report`."""
        state, batch = self.abstract_args()
        found: dict[str, list[Any]] = {"parameters": [], "optimizer": [], "other": []}
        for tensor, leaf in zip(*map(jax.tree.leaves, (self.tensors, state)), strict=True):
            found[table.kind(tensor.path)].append(leaf)
        return {"other state" if name == "other" else name: part for name, part in found.items()} | {"batch": batch}

    def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns a batch of `rows` rows as shapes with shardings."""
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
        """Rows of an evaluation batch that are computed at once."""
        return eval_batch_rows(self.config) // eval_parts(self.config)

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
        """Returns the shardings of the train state as plain data: mesh axes larger than 1, rows, totals, warnings."""
        trees = self.tensors, self.abstract_state, self.state_shardings
        rows = table.rows(*trees)
        named, abstract, _ = (self.codec.unpack(tree).params for tree in trees)
        computing = table.rows(named, abstract, self.param_shardings.compute)
        is_trained = by_name(trainable(self.config)(self._params))
        names = [name for name, kept in is_trained.items() if kept]
        gradients = table.gradient_rows(*trees, names, self.config.grad_dtype)
        axes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        totals = table.totals([*rows, *gradients])
        return {"mesh": axes, "tensors": rows, "totals": totals, "warnings": table.disagreements(computing)}

    def compile(self) -> Any:
        """Returns the compiled training step."""
        return self.step.lower(*self.abstract_args()).compile()

    @property
    def step_on_leaves(self) -> Any:
        """`step`, but the state is passed and returned as a list of leaves: flattening an `nnx.State` is slow."""
        structure: Any = jax.tree.structure(self.abstract_state)  # its stubs lack unflatten
        step = self.step.__wrapped__

        @functools.wraps(step)
        def on_leaves(leaves: list[Any], batch: Any) -> Any:
            state, metrics = step(structure.unflatten(leaves), batch)
            return jax.tree.leaves(state), metrics

        return _jitted(on_leaves, jax.tree.leaves(self.state_shardings), self.batch_shardings, self.metric_shardings)

    def compile_on_leaves(self, options: Mapping[str, Any] | None = None) -> Any:
        """Compiles `step_on_leaves`. `options` are compiler options of XLA."""
        state, batch = self.abstract_args()
        return self.step_on_leaves.lower(jax.tree.leaves(state), batch).compile(options)

    def sharded(self, fn: Callable[..., Any], *, whole_rows: bool = False) -> Callable[..., Any]:
        """Returns `fn` such that its layers shard their arrays over this run's mesh when it is traced.

        With `whole_rows`, no mesh axis shards the length of a row, as token-by-token sampling requires.
        """
        whole = dict.fromkeys(_LENGTHS, ()) if whole_rows else {}
        return on_this_mesh(fn, self.mesh, {**self.rules, **whole})


def with_steps(run: Run) -> Run:
    """Returns `run` with `step` and `eval_step`, made from its other fields."""
    codec, fetch, update = run.codec, run.fetch, run.update
    evaluation = on_this_mesh(make_evaluation(run.objective, run.param_shardings), run.mesh, run.rules)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        tree, metrics = update(fetch(codec.unpack(state)), batch)
        return codec.pack(tree), metrics

    def eval_step(state: Any, *args: Any) -> Any:
        return evaluation(*run.trained(codec.unpack(state)), *args)

    stored, batch = run.state_shardings, run.batch_shardings
    return run._replace(
        step=_jitted(step, stored, batch, run.metric_shardings),
        eval_step=jax.jit(eval_step, in_shardings=(stored, batch, run.replicated), out_shardings=run.replicated),
    )


def batch_shardings(objective: Objective, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """Returns the sharding of every array in a batch of `objective`."""
    return {
        name: NamedSharding(mesh, spec([_AXES.get(size) for size in field.shape], rules))
        for name, field in batch_fields(objective).items()
    }


def on_this_mesh(fn: Callable[..., Any], mesh: Mesh, rules: Rules) -> Callable[..., Any]:
    """Returns `fn` such that its layers shard their arrays over `mesh` by `rules` when it is traced."""

    @functools.wraps(fn)
    def traced_there(*args: Any) -> Any:
        with on_mesh(mesh, rules):
            return fn(*args)

    return traced_there


def _jitted(step: Callable[..., Any], state: Any, batch: Any, metrics: Any) -> Any:
    return jax.jit(step, in_shardings=(state, batch), out_shardings=(state, metrics), donate_argnums=0)

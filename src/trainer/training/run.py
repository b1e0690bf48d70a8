"""The functions, shardings and abstract arrays of a configuration on given devices, before compilation."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from trainer.backends.base import Codec, Model, TrainTree
from trainer.config.capabilities.invariant_keys import compiler_options
from trainer.config.derived import eval_batch_rows, eval_parts, global_batch_rows
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.models.families import forward_flops_per_token
from trainer.objectives.base import Objective, batch_fields, placed_fields
from trainer.ops.paths import Path, by_name, by_path
from trainer.optim.optimizer import trainable
from trainer.products.dequantized import parameter_count
from trainer.sharding import Rules, on_mesh, spec
from trainer.state import table
from trainer.state.builders import set_named_sharding_nnx
from trainer.state.host import Fetch
from trainer.state.shardings import ParamShardings
from trainer.training.evaluate import make_evaluation
from trainer.training.frozen import FrozenArrays

# Maps symbolic sizes of a batch's arrays to logical axes (`objectives.Field`).
_AXES: dict[str | int, str] = {"rows": "activation_batch", "length": "activation_length"}


class States(NamedTuple):
    """The train states of a run: their form, storage and initialization. DiLoCo replaces all fields but `one`."""

    codec: Codec
    tensors: Any  # a `state.Tensor` for every leaf of the native train state
    shardings: Any  # storage shardings of the native train state, a tree with the state's structure
    init: Callable[..., Any]  # (params, rest, step), all optional -> native train state, sharded; see `init_state_fn`
    fetch: Fetch  # under jit: moves the parts of a canonical train state that are in host memory to the device
    one: TrainTree  # canonical train state of one model (with DiLoCo, of one island), as shapes with shardings
    from_one: Callable[[TrainTree], Any]  # converts the train state of one model to the native train state
    first: Callable[[Any], TrainTree]  # canonical train state -> one model's state, without optimizer state


class Computation(NamedTuple):
    """The functions of a run's steps, which operate on canonical train states, and the shardings of their metrics.

    All functions except `read` are for use under jit.
    """

    update: Callable[..., Any]  # (tree, batch, frozen) -> (tree, metrics); see `make_update`
    trained: Callable[[Any], tuple[Any, Any]]  # train state -> the (params, rest) for evaluation and sampling
    metric_shardings: Any  # shardings of the metrics of an update, a prefix of their tree
    read: Callable[[Any, int], dict[str, Any]]  # (metrics, step) -> the step's metrics on the host


class Run(NamedTuple):
    """A configuration on given devices, with jitted functions and abstract arrays. Nothing is compiled or allocated."""

    config: Config  # resolved and frozen
    mesh: Mesh
    rules: Rules
    objective: Objective
    param_shardings: ParamShardings
    batch_shardings: dict[str, NamedSharding]
    frozen: FrozenArrays
    states: States
    computation: Computation
    step: Any = None  # jitted (state, batch, frozen) -> (state, metrics); the native train state is donated
    # `step`, but the state is passed and returned as a list of leaves: flattening an `nnx.State` is slow.
    step_on_leaves: Any = None
    eval_step: Any = None  # jitted (state, batch, frozen, bytes per token [vocab]) -> sums

    @property
    def codec(self) -> Codec:
        """The codec of the train states."""
        return self.states.codec

    @property
    def model(self) -> Model:
        """The model."""
        return self.codec.model

    @property
    def init(self) -> Callable[..., Any]:
        return self.states.init

    @property
    def abstract_state(self) -> Any:
        """The native train state, with a ShapeDtypeStruct at each leaf."""
        return self.codec.abstract

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is replicated on all devices."""
        return NamedSharding(self.mesh, spec([], self.rules))

    def abstract_args(self) -> tuple[Any, dict[str, jax.ShapeDtypeStruct], Any]:
        """Returns the arguments of `step` as shapes with shardings."""
        state = set_named_sharding_nnx(self.abstract_state, self.states.shardings)
        return state, self.abstract_batch(self.rows), self.frozen.abstract

    def check_arguments(self) -> None:
        """Refuses parameters that compiled programs do not accept as arguments.

        Raises:
          UserError: a parameter has 4-bit integers and the devices are CPUs, on which JAX's layout check of arguments
            fails for such integers.
        """
        leaves = by_name(self._params).items()
        names = [name for name, leaf in leaves if leaf.dtype in (jnp.int4, jnp.uint4)]
        if names and self.mesh.devices.flat[0].platform == "cpu":
            raise UserError(
                f"{names[0]} contains 4-bit integers, which compiled JAX programs do not accept on CPUs; store the "
                "weights in int8, fp8 or nf4, or train on other devices"
            )

    def parts(self) -> dict[str, Any]:
        """Returns a dict from a kind of argument (parameters, optimizer, other state, frozen, batch) to the abstract
        arrays of this kind that `step` gets, for `aot.report`."""
        state, batch, frozen = self.abstract_args()
        found: dict[str, Any] = {"parameters": [], "optimizer": [], "other": []}
        for tensor, leaf in zip(*map(jax.tree.leaves, (self.states.tensors, state)), strict=True):
            found[table.kind(tensor.path)].append(leaf)
        other = found.pop("other")
        return found | {"other state": other, "frozen": frozen, "batch": batch}

    def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch of `rows` rows once it is on the devices, as shapes with shardings, by name."""
        sizes: dict[str | int, Any] = {"rows": rows, "length": self.config.max_target_length}
        return {
            name: jax.ShapeDtypeStruct(
                [sizes.get(size, size) for size in field.shape], field.dtype, sharding=self.batch_shardings[name]
            )
            for name, field in placed_fields(self.objective).items()
        }

    def given_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of `abstract_batch` that a batch source provides; the objective derives the others."""
        abstract = self.abstract_batch(rows)
        return {name: abstract[name] for name in batch_fields(self.objective)}

    @property
    def rows(self) -> int:
        """Number of rows in the global batch of one update."""
        return global_batch_rows(self.config)

    @property
    def eval_rows(self) -> int:
        """Number of rows that one evaluation step computes: an evaluation batch, or one of its equal parts."""
        return eval_batch_rows(self.config) // eval_parts(self.config)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return parameter_count(self._params)

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters of the model."""
        is_trained = by_path(trainable(self.config)(self._params))
        return sum(math.prod(leaf.shape) for path, leaf in by_path(self._params).items() if is_trained[path])

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs per token of one training step; see `models.families.forward_flops_per_token`. A reference model
        or a teacher adds one forward pass."""
        passes = 3 + self.frozen.of_parameters
        return passes * forward_flops_per_token(self.config, self._params) + self.frozen.flops

    @property
    def _params(self) -> Any:
        return self.codec.unpack(self.abstract_state).params

    @property
    def base_names(self) -> frozenset[Path]:
        """The paths of the parameters that no step changes and no checkpoint contains: the base model of adapters."""
        if not self.config.enable_lora:
            return frozenset()
        is_trained = by_path(trainable(self.config)(self._params))
        return frozenset(path for path, trained in is_trained.items() if not trained)

    def table(self) -> dict[str, Any]:
        """Returns the shardings of the train state and of `frozen` as plain data: the mesh axes of size > 1, a row for
        each array, totals and warnings."""
        trees = self.states.tensors, self.abstract_state, self.states.shardings
        frozen = self.frozen.abstract, jax.tree.map(lambda leaf: leaf.sharding, self.frozen.abstract)
        rows = [*table.rows(*trees), *table.rows(self.frozen.tensors, *frozen)]
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

    def trace_on_leaves(self, rows: int | None = None) -> Any:
        """Traces `step_on_leaves`. `rows`: the number of rows of the batch; by default, the number of rows of a full
        batch."""
        state, batch, frozen = self.abstract_args()
        batch = batch if rows is None else self.abstract_batch(rows)
        return self.step_on_leaves.trace(jax.tree.leaves(state), batch, frozen)

    def compile_on_leaves(self, options: Mapping[str, Any] | None = None, rows: int | None = None) -> Any:
        """Compiles `step_on_leaves`. `options`: compiler options of XLA. `rows`: see `trace_on_leaves`."""
        return self.trace_on_leaves(rows).lower().compile(options)

    def sharded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` wrapped so that, when it is traced, layers shard their arrays over this run's mesh."""
        return on_mesh(self.mesh, self.rules)(fn)


def with_steps(run: Run) -> Run:
    """Returns `run` with its jitted functions, made from its other fields."""
    codec, fetch, update, trained = run.codec, run.states.fetch, run.computation.update, run.computation.trained
    structure: Any = jax.tree.structure(run.abstract_state)  # a PyTreeDef, whose stubs lack unflatten
    evaluation = run.sharded(make_evaluation(run.objective, run.param_shardings))

    def step(state: Any, batch: Any, frozen: Any) -> tuple[Any, Any]:
        tree, metrics = update(fetch(codec.unpack(state)), batch, run.frozen.fetch(frozen))
        return codec.pack(tree), metrics

    @functools.wraps(step)
    def on_leaves(leaves: list[Any], batch: Any, frozen: Any) -> Any:
        state, metrics = step(structure.unflatten(leaves), batch, frozen)
        return jax.tree.leaves(state), metrics

    def eval_step(state: Any, batch: Any, frozen: Any, lengths: Any) -> Any:
        return evaluation(*trained(codec.unpack(state)), batch, run.frozen.fetch(frozen), lengths)

    evaluated = *_inputs(run, run.states.shardings), run.replicated
    return run._replace(
        step=_jitted(run, step, run.states.shardings),
        step_on_leaves=_jitted(run, on_leaves, jax.tree.leaves(run.states.shardings)),
        eval_step=jax.jit(
            eval_step, in_shardings=evaluated, out_shardings=run.replicated, compiler_options=_options(run)
        ),
    )


def batch_shardings(objective: Objective, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """Returns the sharding of every array that a batch for `objective` has once it is on the devices, by name."""
    return {
        name: NamedSharding(mesh, spec([_AXES.get(size) for size in field.shape], rules))
        for name, field in placed_fields(objective).items()
    }


def _jitted(run: Run, step: Callable[..., Any], stored: Any) -> Any:
    outputs = stored, run.computation.metric_shardings
    inputs, options = _inputs(run, stored), _options(run)
    return jax.jit(step, in_shardings=inputs, out_shardings=outputs, donate_argnums=0, compiler_options=options)


def _options(run: Run) -> dict[str, str]:
    return compiler_options(run.config, run.mesh.devices.flat[0].platform)


def _inputs(run: Run, stored: Any) -> tuple[Any, Any, Any]:
    return stored, run.batch_shardings, jax.tree.map(lambda leaf: leaf.sharding, run.frozen.abstract)

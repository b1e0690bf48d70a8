"""Measurements of a program: parameters, activations, loss, gradients, one update, the compiled step.

Each measurement transfers the common starting state to the devices again, so that the devices hold only one state at a
time. A measurement's executables are kept until all sides are measured, so that a side with the same program text
reuses them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainer.aot.cost import analyze
from trainer.backends.base import TrainTree
from trainer.compare.midway import ISLANDS, midway
from trainer.config.capabilities.context_keys import token_order
from trainer.config.capabilities.invariant_keys import compiler_options
from trainer.config.capabilities.pipeline_keys import unpipelined
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.data.batches import Batch
from trainer.layers.sown import Activation
from trainer.leaves.source import filled, names_of
from trainer.models import families
from trainer.models.mtp import MTP
from trainer.models.names import Names
from trainer.models.stages import named_by_layer
from trainer.objectives.forward import ahead_of, hidden_states
from trainer.ops.order import in_true_order
from trainer.ops.paths import by_name
from trainer.state.stages import abstract_layers, in_layers, in_stages
from trainer.training.batches import placed
from trainer.training.run import Run
from trainer.training.start import Start, other_arrays
from trainer.training.step import dropout_key, make_gradients

# The names of the facts about the compiled step in `Measured.facts`. Their numbers are per device.
TEXT, FLOPS, ARGUMENTS, TEMPORARIES = "program text", "FLOPs", "memory: state, batch", "memory: temporaries"

# The names of the quantities of an update at a simulated later step; see `update`.
LATER = ("later parameters", "later optimizer state")

Arrays = dict[str, Any]  # by canonical name


@dataclass
class Shared:
    """Values that are computed for one side and reused for the other sides of the same measurement."""

    executables: dict[Any, Any] = field(default_factory=dict)  # compiled programs, by program text
    midway: Arrays | None = None  # a simulated later state of the left side; see `update`


@dataclass(frozen=True)
class Program:
    """The run of one side, and a map from the side's parameter names to the left side's names."""

    name: str
    run: Run
    names: Names

    @property
    def config(self) -> Any:
        """The resolved and frozen configuration."""
        return self.run.config

    def layers(self, name: str) -> range | None:
        """Returns the layer indices of the array with this canonical name; None if the array is not in a stack."""
        stack = families.place(families.stacks(unpipelined(self.config)), name)
        return None if stack is None or name.startswith(ISLANDS) else stack.layers

    @property
    def abstract(self) -> Any:
        """The canonical train state with a ShapeDtypeStruct, including the sharding, at each leaf."""
        return self.run.codec.unpack(self.run.abstract_args()[0])

    def tree(self, native: Any) -> Any:
        """Returns the canonical form of a native train state, with arrays by layer instead of by pipeline stage."""
        return in_layers(self.config, self.run.codec.unpack(native))

    @property
    def by_layer(self) -> Any:
        """Like `abstract`, but with arrays by layer instead of by pipeline stage."""
        return abstract_layers(self.config, self.abstract)


@dataclass(frozen=True)
class Snapshot:
    """The common starting state, on the host. `params`: the parameters, by the left side's names. `later`: the other
    leaves of a trained state (step, optimizer state, variables without gradients), by path; None at step 0."""

    params: Arrays
    later: Arrays | None


@dataclass
class Measured:
    """The measured arrays, by the name of the quantity and the canonical name of the array, and facts about the
    compiled step. The arrays may be on devices."""

    arrays: dict[str, Arrays]
    facts: dict[str, Any] = field(default_factory=dict)

    def on_host(self) -> "Measured":
        """Returns a copy with its arrays on the host."""
        return Measured({name: jax.tree.map(np.array, arrays) for name, arrays in self.arrays.items()}, self.facts)


def take(program: Program, begin: Start) -> Snapshot:
    """Returns a snapshot of the starting state `begin`."""
    tree = program.tree(begin.state)
    params = {program.names.common(name): np.array(leaf) for name, leaf in names_of(tree.params).items()}
    later = tree._replace(params=None)
    return Snapshot(params, {k: np.array(v) for k, v in by_name(later).items()} if begin.updates else None)


def state(program: Program, snapshot: Snapshot) -> Any:
    """Returns the side's native train state, with the parameters of `snapshot` in the side's dtypes and shardings.

    A parameter that the snapshot lacks or has with another size gets this side's initial value.

    Raises:
      UserError: the snapshot contains a trained state, and this side's optimizer state has another structure.
    """
    run = program.run
    wanted = names_of(program.by_layer.params)
    given = {name: snapshot.params.get(program.names.common(name)) for name in wanted}
    fits = {name: x for name, x in given.items() if x is not None and x.size == wanted[name].size}
    params = {} if len(fits) == len(wanted) else names_of(program.tree(run.init()).params)
    for name, array in fits.items():
        leaf = wanted[name]
        params[name] = jax.device_put(array.reshape(leaf.shape).astype(leaf.dtype), leaf.sharding)
    whole = filled(program.by_layer.params, params)
    native = run.init(in_stages(run.config, whole, program.abstract.params))
    return native if snapshot.later is None else _with_later(program, native, snapshot.later)


def _with_later(program: Program, native: Any, later: Mapping[str, np.ndarray]) -> Any:
    tree = program.run.codec.unpack(native)
    rest = program.by_layer._replace(params=None)
    renamed = {program.names.common(name): leaf for name, leaf in by_name(rest).items()}
    if renamed.keys() != later.keys() or any(leaf.size != later[name].size for name, leaf in renamed.items()):
        odd = sorted(renamed.keys() ^ later.keys()) or sorted(
            name for name, leaf in renamed.items() if leaf.size != later[name].size
        )
        raise UserError(
            f"{program.name}: its optimizer state has a different structure from that of load_full_state_path (first: "
            f"{odd[0]}); compare from parameters only, with load_parameters_path"
        )
    leaves = [
        jax.device_put(later[name].reshape(leaf.shape).astype(leaf.dtype), leaf.sharding)
        for name, leaf in renamed.items()
    ]
    whole = jax.tree.unflatten(jax.tree.structure(rest), leaves)
    staged = in_stages(program.config, whole, program.abstract._replace(params=None))
    return program.run.codec.pack(staged._replace(params=tree.params))


def _compiled(known: Shared, run: Run, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns `fn` compiled for `args` and the mesh of `run`, with the compiler options of the training step. If
    `known` contains an executable of the same program, returns this executable."""
    options = compiler_options(run.config, run.mesh.devices.flat[0].platform)
    lowered = jax.jit(run.sharded(fn), compiler_options=options).lower(*args)
    key = (lowered.as_text(), lowered.in_tree, lowered.out_tree, *options)
    if key not in known.executables:
        known.executables[key] = lowered.compile()
    return known.executables[key]


def parameters(program: Program, snapshot: Snapshot, batch: Batch, known: Shared) -> Measured:
    """Measures the parameters in the native train state."""
    del batch, known
    tree = program.tree(state(program, snapshot))
    return Measured({"parameters": program.names.of(names_of(tree.params))})


def activations(program: Program, snapshot: Snapshot, batch: Batch, known: Shared) -> Measured:
    """Measures the forward pass on `batch`: embedding, sown values and block outputs, final norm, logits, and the
    activations that the objective captures. Padding is set to 0, and tokens are in their original order."""
    run = program.run
    tree = _forward(run, state(program, snapshot))

    def forward(tree: TrainTree, batch: Any) -> Arrays:
        key = dropout_key(run.config, tree.step)
        params = jax.lax.with_sharding_constraint(tree.params, run.param_shardings.compute)
        types: tuple[type[nnx.Variable], ...] = (Activation, *run.objective.captures)
        hidden, sown = hidden_states(run.model.apply, params, tree.rest, batch, key, types)
        logits, _, _ = run.model.apply(params, tree.rest, hidden, method="head")
        values = {name: value for kind in types for name, value in sown[kind.__name__].items()}
        values = named_by_layer(families.stacks(run.config), values) | {"final_norm": hidden, "logits": logits}
        return {
            name: _of_tokens(run.config, x, _real(name, batch), int(program.layers(name) is not None))
            for name, x in values.items()
        }

    on_devices = placed(run, batch)
    return Measured({"activations": _compiled(known, run, forward, tree, on_devices)(tree, on_devices)})


def _forward(run: Run, native: Any) -> TrainTree:
    """Returns the parts of a native train state that a forward pass reads. With DiLoCo, the result has the outer
    parameters and the first island's `rest`."""
    return run.states.first(run.codec.unpack(native))


def _real(name: str, batch: Any) -> jax.Array:
    """Returns a mask of the tokens at which the activation `name` is compared, bool [b, t]: all tokens except padding.
    For activations of multi-token prediction, a token that lacks a target token in any of the modules counts as
    padding."""
    segments = batch["inputs_segmentation"]
    if name.startswith(f"{MTP}/") and (ahead := ahead_of(batch)) is not None:
        segments = ahead.segments[..., -1]
    return segments != 0


def _of_tokens(config: Config, x: jax.Array, real_bt: jax.Array, lead: int) -> jax.Array:
    """Returns `x` [lead axes, b, t, ...] with padding set to 0 and tokens in their original order. An `x` without the
    axes [b, t] is returned unchanged."""
    axes = real_bt.shape
    if x.shape[lead : lead + 2] != axes:
        return x
    x = jnp.where(real_bt.reshape((1,) * lead + axes + (1,) * (x.ndim - lead - 2)), x, 0)
    if (moved := token_order(config)) is None:
        return x
    strategy, n = moved
    rows: jax.Array = in_true_order(x.reshape(-1, *x.shape[lead + 1 :]), n, strategy)
    return rows.reshape(x.shape)


def gradients(program: Program, snapshot: Snapshot, batch: Batch, known: Shared) -> Measured:
    """Measures the loss, its terms, other metrics, and the gradients (in `grad_dtype`, unclipped) of trained
    parameters."""
    run = program.run
    tree = _forward(run, state(program, snapshot))
    fn = make_gradients(run.config, run.objective, run.param_shardings)
    args = tree, placed(run, batch), other_arrays(run, tree.params, lambda line: None)
    got = _compiled(known, run, fn, *args)(*args)
    grads = by_name(in_layers(run.config, got.grads))
    return Measured({"loss": {"loss": got.loss, **got.means}, "gradients": program.names.of(grads)})


def update(program: Program, snapshot: Snapshot, batch: Batch, known: Shared) -> Measured:
    """Measures the training step, compiled as for training: parameters and optimizer after one update, and the step's
    cost.

    At step 0, also measures an update of the same parameters with a simulated optimizer state of a later step (see
    `midway`). The simulated state is drawn once, for the left side. The second update is skipped for a side whose
    optimizer state has a different structure.
    """
    run = program.run
    text = _text(program)
    compiled, tree = run.compile(), _forward(run, state(program, snapshot))
    frozen = other_arrays(run, tree.params, lambda line: None)

    def after(begin: Snapshot) -> tuple[Arrays, Arrays]:
        native, _ = compiled(state(program, begin), placed(run, batch), frozen)
        tree = program.tree(native)
        return program.names.of(names_of(tree.params)), program.names.of(by_name(tree._replace(params=None)))

    params, first = after(snapshot)
    arrays = {"updated parameters": params, "optimizer state": first}
    if snapshot.later is None:
        arrays = Measured(arrays).on_host().arrays  # copied so that the devices never hold two states
        if known.midway is None:
            known.midway = midway(first, run.config)
        later = known.midway
        fits = {name: leaf.size for name, leaf in first.items()} == {name: leaf.size for name, leaf in later.items()}
        arrays |= dict(zip(LATER, after(replace(snapshot, later=later)) if fits else ({}, {}), strict=True))
    return Measured(arrays, {TEXT: text, **_cost(compiled)})


def _text(program: Program) -> str:
    """Returns the StableHLO text of an update of the canonical train state. The text of an update of the native state
    would depend on the order of the native state's leaves."""
    run, tree = program.run, program.abstract
    stored = jax.tree.map(lambda leaf: leaf.sharding, tree)
    jitted = jax.jit(run.computation.update, out_shardings=(stored, run.computation.metric_shardings), donate_argnums=0)
    return jitted.lower(tree, run.abstract_batch(run.rows), run.frozen.abstract).as_text()


def _cost(compiled: Any) -> dict[str, Any]:
    """Returns a dict with the FLOPs of a step and, if the compiler reports it, its memory: bytes per device."""
    facts = {FLOPS: analyze(compiled.as_text()).flops}
    if (memory := compiled.memory_analysis()) is not None:
        facts[ARGUMENTS] = float(memory.argument_size_in_bytes)
        facts[TEMPORARIES] = float(memory.temp_size_in_bytes)
    return facts

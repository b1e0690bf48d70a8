"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105): islands train independently and synchronize from time to time.

An island is a group of devices that trains its own copy of the model. Each island performs `diloco_sync_period` updates
independently. Then the islands synchronize: the outer optimizer updates the outer parameters with the outer gradient,
which is the outer parameters minus the mean of the islands' parameters. Every island continues from the new outer
parameters and keeps its optimizer state.

Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512) synchronizes one fragment of the parameters at a time. Plain
DiLoCo has a single fragment.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.backends.base import StateCodec, TrainTree
from trainer.config.capabilities.diloco_keys import Schedule, schedule
from trainer.config.derived import islands
from trainer.config.keys import Config
from trainer.optim.outer import make_outer_optimizer, sent
from trainer.sharding import MAPPED, Rules
from trainer.state.diloco import (
    AXIS,
    DiLoCoTrainState,
    diloco_shardings,
    diloco_tensors,
    make_diloco_codec,
    mean_of_islands,
)
from trainer.state.fragments import Fragment, fragments
from trainer.state.host import fetcher
from trainer.state.init import init_state_fn
from trainer.training.metrics import due
from trainer.training.router_metrics import DROPPED, TOKENS
from trainer.training.run import Computation, States

Batch = Mapping[str, jax.Array]
Metrics = dict[str, dict[str, jax.Array]]

# The two groups of a step's metrics: those of the islands, each [islands, ...], and those of the synchronization.
ISLANDS, OUTER = "islands", "outer"
# How to combine the islands' values of a metric. For a metric that is not listed, floats are averaged; integers are
# flags, and their maximum is taken.
_COMBINED: dict[str, Callable[..., Any]] = {
    "tokens": np.sum,
    "finite": np.min,
    "max_logit": np.max,
    "clipped_heads": np.sum,
    **dict.fromkeys((TOKENS, DROPPED), np.sum),
}


def rules_of_islands(rules: Rules) -> tuple[Rules, Rules]:
    """Returns two sets of sharding rules: for the computation of one island, and for a global batch, which contains the
    rows of all islands."""
    batch = {MAPPED: (), "activation_batch": (AXIS, *rules["activation_batch"])}
    return {**rules, MAPPED: (AXIS,)}, {**rules, **batch}


def with_islands(
    config: Config, mesh: Mesh, params: Any, island: States, computation: Computation
) -> tuple[States, Computation]:
    """Returns the states and the computation for all islands, made from `island` and `computation`, which are for one
    island.

    Evaluation and sampling use the outer parameters and all devices.

    Args:
      config: the resolved configuration.
      params: the shardings of the outer parameters.
    """
    assert isinstance(island.codec, StateCodec)
    codec = make_diloco_codec(config, island.codec)
    stored = diloco_shardings(codec.abstract, island.shardings, params)
    on_device = jax.tree.map(lambda sharding: sharding.with_memory_kind("device"), stored.inner_state)
    fetch_islands = fetcher(config, codec.inner.unpack(on_device))
    replicated = NamedSharding(mesh, PartitionSpec())

    def fetch(tree: DiLoCoTrainState) -> DiLoCoTrainState:
        return tree._replace(inner_state=fetch_islands(tree.inner_state))

    def first(tree: DiLoCoTrainState) -> TrainTree:
        params, _ = codec.weights(tree)
        return TrainTree(tree.step, params, None, jax.tree.map(lambda leaf: leaf[0], tree.inner_state.rest))

    states = States(
        codec=codec,
        tensors=diloco_tensors(codec),
        shardings=stored,
        init=init_state_fn(codec, stored, config.init_weights_seed),
        fetch=fetch,
        one=island.one,
        from_one=jax.jit(lambda tree: codec.pack(codec.broadcast(tree)), out_shardings=stored),
        first=first,
    )
    return states, Computation(
        update=build_diloco_train_step(config, computation.update, params),
        trained=codec.weights,
        metric_shardings={ISLANDS: NamedSharding(mesh, PartitionSpec(AXIS)), OUTER: replicated},
        read=_reader(config, replicated),
    )


def _same_rest(rest: Any) -> Any:
    """Returns the islands' `rest` with every island's values replaced by the mean over the islands."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(mean_of_islands(leaf), leaf.shape), rest)


def build_diloco_train_step(
    config: Config, update: Callable[[TrainTree, Batch, Any], tuple[TrainTree, dict[str, jax.Array]]], shardings: Any
) -> Callable[[DiLoCoTrainState, Batch, Any], tuple[DiLoCoTrainState, Metrics]]:
    """Returns `step(state, batch, frozen) -> state, metrics` for a canonical `DiLoCoTrainState`.

    All islands share `frozen`. The step runs `update` on every island, then synchronizes the fragments that are due
    (`capabilities.diloco_keys.Schedule`). Synchronization runs inside a conditional, so islands communicate only in
    steps in which a fragment is due.

    Args:
      config: the resolved configuration.
      update: the update of one island, sharded over the island's mesh axes (`training.step.make_update`).
      shardings: the shardings of the outer parameters.
    """
    count, plan, synchronize = islands(config), schedule(config), _synchronization(config, shardings)
    # All islands share one scalar step count. Under vmap, a conditional on a count per island would become a select.
    state_axes: Any = TrainTree(step=None, params=0, opt_state=0, rest=0)
    on_islands = jax.vmap(update, in_axes=(state_axes, 0, None), out_axes=(state_axes, 0), spmd_axis_name=AXIS)

    def step(state: DiLoCoTrainState, batch: Batch, frozen: Any) -> tuple[DiLoCoTrainState, Metrics]:
        split = {name: x.reshape(count, -1, *x.shape[1:]) for name, x in batch.items()}
        inner, metrics = on_islands(state.inner_state._replace(step=state.step), split, frozen)
        updates = state.step + 1
        # Each island keeps its own optimizer moments and update-rule state.
        changing = Averaged(inner.params, state.params, state.outer_opt_state, inner.rest)
        new, found = synchronize(changing, state.in_flight, updates)
        inner = inner._replace(step=jnp.broadcast_to(updates, count), params=new.islands, rest=new.rest)
        in_flight = _in_flight(plan, state.in_flight, updates)
        return DiLoCoTrainState(inner, new.params, new.opt_state, updates, in_flight), {ISLANDS: metrics, OUTER: found}

    return step


class Averaged(NamedTuple):
    """The values that a synchronization reads and changes."""

    islands: Any  # the islands' parameters
    params: Any  # the outer parameters
    opt_state: Any  # the state of the outer optimizer
    rest: Any  # the islands' state that is not trained by gradients, such as router biases


class Moved(NamedTuple):
    """How far the islands moved away from the outer parameters since the last synchronization."""

    mean: jax.Array  # squared norm of the outer gradient
    islands: jax.Array  # [islands], squared distance of each island from the outer parameters


def _synchronization(config: Config, shardings: Any) -> Callable[..., tuple[Averaged, dict[str, jax.Array]]]:
    """Returns `synchronize(changing, in_flight, updates) -> changing, metrics`.

    After update number `updates`, `synchronize` runs the outer update of the fragments that are due. With a delay, it
    merges the result of an outer update into the islands' parameters at a later update. `Schedule` determines both
    times.
    """
    plan, parts = schedule(config), fragments(config)

    def synchronize(now: Averaged, in_flight: Any, updates: jax.Array) -> tuple[Averaged, dict[str, jax.Array]]:
        ended, moved = updates == plan.steps, []
        for i, fragment in enumerate(parts):
            if plan.delay:
                arrives = plan.arrives(i, in_flight, updates)
                take = functools.partial(_take, fragment, plan.alpha)
                now = jax.lax.cond(arrives, take, lambda old: old, now)
            step = functools.partial(_outer_step, config, fragment, shardings)
            now, found = jax.lax.cond(plan.synchronizes(i, updates), step, functools.partial(_unchanged, step), now)
            moved.append(found)
        if plan.delay or plan.alpha:
            take = functools.partial(_take, None, 0.0)
            now = jax.lax.cond(ended, take, lambda old: old, now)
        return now, _disagreement(jax.tree.map(lambda *found: functools.reduce(jnp.add, found), *moved))

    return synchronize


def _in_flight(plan: Schedule, before: Any, updates: jax.Array) -> Any:
    """Returns the value of `DiLoCoTrainState.in_flight` after update number `updates`. `before`: its previous value."""
    if not plan.delay:
        return None
    left = jnp.where(updates == before + plan.delay, 0, before)
    synchronizes = functools.reduce(jnp.logical_or, (plan.synchronizes(i, updates) for i in range(plan.fragments)))
    return jnp.where(updates == plan.steps, 0, jnp.where(synchronizes, updates, left))


def _outer_step(config: Config, fragment: Fragment, shardings: Any, old: Averaged) -> tuple[Averaged, Moved]:
    """Runs the outer update of `fragment`. Without a delay, islands adopt the result immediately."""
    plan, outer = schedule(config), make_outer_optimizer(config)
    islands, params, opt_state = fragment.part(old.islands, 1), fragment.part(old.params), fragment.part(old.opt_state)
    stored = fragment.shardings(shardings)

    def moved(param: jax.Array, of_islands: jax.Array) -> jax.Array:
        if param.dtype != of_islands.dtype:  # rounding at the last synchronization must not count as movement
            kind = jnp.finfo(of_islands.dtype)
            # reduce_precision instead of a cast, because XLA may remove a cast followed by its inverse.
            param = jax.lax.reduce_precision(param, kind.nexp, kind.nmant)
        return param.astype(jnp.float32) - of_islands.astype(jnp.float32)

    deltas = sent(config.diloco_outer_grad_dtype, jax.tree.map(moved, params, islands), stored)
    grads = jax.lax.with_sharding_constraint(jax.tree.map(lambda delta: jnp.mean(delta, 0), deltas), stored)
    updates, opt_state = outer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    new = old._replace(
        params=fragment.put(old.params, params),
        opt_state=fragment.put(old.opt_state, opt_state),
        rest=_same_rest(old.rest),
    )
    if not plan.delay:
        new = _take(fragment, plan.alpha, new)
    # Replicate the metrics inside the branch of the conditional, so that only synchronizing steps communicate.
    replicated = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    squares = [jnp.sum(delta**2, range(1, delta.ndim)) for delta in jax.tree.leaves(deltas)]
    found = Moved(optax.tree.norm(grads, squared=True), functools.reduce(jnp.add, squares))
    return new, jax.lax.with_sharding_constraint(found, replicated)


def _take(fragment: Fragment | None, alpha: float, old: Averaged) -> Averaged:
    """Sets the parameters of every island to alpha x the island's parameters + (1 - alpha) x the outer parameters.

    `fragment`: the fragment to set; None: all parameters are set.
    """

    def one(param: jax.Array, before: jax.Array) -> jax.Array:
        if not alpha:
            return jnp.broadcast_to(param.astype(before.dtype), before.shape)
        # This form is exact if both values are equal, so frozen parameters do not change.
        mean = param.astype(jnp.float32)
        return (mean + alpha * (before.astype(jnp.float32) - mean)).astype(before.dtype)

    if fragment is None:
        return old._replace(islands=jax.tree.map(one, old.params, old.islands))
    new = jax.tree.map(one, fragment.part(old.params), fragment.part(old.islands, 1))
    return old._replace(islands=fragment.put(old.islands, new, 1))


def _unchanged(step: Callable[..., Any], old: Averaged) -> tuple[Averaged, Any]:
    """Returns `old`, and zeros in place of the metrics of `step`."""
    _, found = jax.eval_shape(step, old)
    return old, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found)


def _disagreement(moved: Moved) -> dict[str, jax.Array]:
    """Returns metrics of the disagreement between islands:

    - `outer_grad_norm`: the norm of the outer gradient;
    - `island_distance` [islands]: the distance of each island from the outer parameters;
    - `island_cosine`: the mean dot product of two islands' displacements, divided by the mean square of a displacement.
      If all islands moved equally far, this is the mean cosine between displacements.
    """
    metrics = {"outer_grad_norm": jnp.sqrt(moved.mean), "island_distance": jnp.sqrt(moved.islands)}
    if (count := len(moved.islands)) > 1:
        total = jnp.sum(moved.islands)
        # The squared norm of the sum of the displacements contains the dot product of each pair twice.
        pairs = count**2 * moved.mean - total
        metrics["island_cosine"] = pairs / jnp.where(total > 0, (count - 1) * total, 1)
    return metrics


def _reader(config: Config, replicated: NamedSharding) -> Callable[[Metrics, int], dict[str, Any]]:
    """Returns the function `Computation.read`, which combines the metrics of the islands.

    `_COMBINED` lists the metrics that are summed, or reduced to their minimum or maximum. Any other integer metric is a
    flag, which is set if an island sets it. Any other floating-point metric is averaged over the islands whose batch
    has tokens that contribute to the loss. `island_losses` contains the loss of each island. Only steps that
    synchronize have synchronization metrics.
    """
    gather, plan = jax.jit(lambda metrics: metrics, out_shardings=replicated), schedule(config)

    def read(metrics: Metrics, step: int) -> dict[str, Any]:
        of_islands = due(config, metrics[ISLANDS], step)
        # Each process can read only the metrics of its local islands.
        here = all(value.is_fully_addressable for value in of_islands.values())
        found = jax.device_get(of_islands if here else gather(of_islands))
        bearing = found["tokens"] > 0 if found["tokens"].any() else slice(None)
        row = {name: _combined(name, value, bearing) for name, value in found.items()}
        row["island_losses"] = found["loss"]
        return row | (jax.device_get(metrics[OUTER]) if plan.any_synchronizes(step + 1) else {})

    return read


def _combined(name: str, value: np.ndarray, bearing: Any) -> Any:
    if combined := _COMBINED.get(name.rpartition("/")[2]):
        return combined(value, 0)
    if np.issubdtype(value.dtype, np.floating):
        return np.mean(value[bearing], 0)
    return np.max(value, 0)

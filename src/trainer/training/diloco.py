"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105): islands train alone and average from time to time.

Each island takes `diloco_sync_period` updates by itself. Then the mean of what the islands moved by is a gradient of
the outer parameters, the outer optimizer moves these, and every island goes on from them with its own optimizer state.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from trainer.backends import StateCodec, TrainTree
from trainer.config.derived import islands
from trainer.optim.outer import make_outer_optimizer
from trainer.sharding import MAPPED
from trainer.state import init_state_fn
from trainer.state.diloco import (
    AXIS,
    DiLoCoTrainState,
    diloco_shardings,
    diloco_tensors,
    make_diloco_codec,
)
from trainer.state.host import fetcher
from trainer.training.metrics import due
from trainer.training.run import Run, batch_shardings, with_steps

Batch = Mapping[str, jax.Array]
Metrics = dict[str, dict[str, jax.Array]]

ISLANDS, OUTER = "islands", "outer"  # metrics of each island, [islands, ...], and of the synchronization
# How metrics of islands are combined; other floating-point numbers are averaged, and other integers are flags.
_COMBINED: dict[str, Callable[..., Any]] = {
    "tokens": np.sum,
    "finite": np.min,
    "max_logit": np.max,
    "clipped_heads": np.sum,
}


def with_islands(run: Run) -> Run:
    """`run`, an island's, as a run of all islands of its configuration.

    A global batch has the rows of all islands. Evaluation and sampling use the outer parameters and all devices.
    """
    config, mesh = run.config, run.mesh
    assert isinstance(run.codec, StateCodec)
    codec = make_diloco_codec(config, run.codec)
    stored = diloco_shardings(codec.abstract, run.state_shardings, run.param_shardings.storage)
    on_device = jax.tree.map(lambda sharding: sharding.with_memory_kind("device"), stored.inner_state)
    fetch_islands = fetcher(config, codec.inner.unpack(on_device))

    def fetch(tree: DiLoCoTrainState) -> DiLoCoTrainState:
        return tree._replace(inner_state=fetch_islands(tree.inner_state))

    rules = {**run.rules, MAPPED: (), "activation_batch": (AXIS, *run.rules["activation_batch"])}
    update = build_diloco_train_step(config, run.update, run.param_shardings.storage)
    outer = run._replace(
        rules=rules,
        codec=codec,
        island=run,
        tensors=diloco_tensors(codec),
        state_shardings=stored,
        batch_shardings=batch_shardings(run.objective, mesh, rules),
        init=init_state_fn(codec, stored, config.init_weights_seed),
        fetch=fetch,
        trained=trained,
        update=update,
        metric_shardings={ISLANDS: NamedSharding(mesh, PartitionSpec(AXIS)), OUTER: run.replicated},
        read=_reader(config, run.replicated),
    )
    return with_steps(outer)


def trained(tree: DiLoCoTrainState) -> tuple[Any, Any]:
    """The outer parameters, and the mean of the islands' variables without gradients."""
    rest = jax.tree.map(lambda leaf: jnp.mean(leaf, 0, dtype=jnp.float32).astype(leaf.dtype), tree.inner_state.rest)
    return tree.params, rest


def build_diloco_train_step(
    config: Any, update: Callable[[TrainTree, Batch], tuple[TrainTree, dict[str, jax.Array]]], shardings: Any
) -> Callable[[DiLoCoTrainState, Batch], tuple[DiLoCoTrainState, Metrics]]:
    """`step(state, batch) -> state, metrics` over the canonical state: `update` of every island, and after every
    `diloco_sync_period` updates, and the last of `steps`, the synchronization.

    The synchronization is a conditional: in all other steps nothing is sent between islands.

    Args:
      config: resolved.
      update: of an island, on its mesh axes (`training.step.make_update`).
      shardings: of the outer parameters.
    """
    count, outer = islands(config), make_outer_optimizer(config)
    # The step count is the same on all islands. As one number it keeps a conditional of an island a conditional.
    state_axes: Any = TrainTree(step=None, params=0, opt_state=0, rest=0)
    on_islands = jax.vmap(update, in_axes=(state_axes, 0), out_axes=(state_axes, 0), spmd_axis_name=AXIS)

    def step(state: DiLoCoTrainState, batch: Batch) -> tuple[DiLoCoTrainState, Metrics]:
        split = {name: x.reshape(count, -1, *x.shape[1:]) for name, x in batch.items()}
        inner, metrics = on_islands(state.inner_state._replace(step=state.step), split)
        updates = state.step + 1
        # Nothing else changes: moments and what update rules keep stay with their island.
        changing = Averaged(inner.params, state.params, state.outer_opt_state)
        synchronize = functools.partial(_synchronize, outer, shardings)
        nothing = functools.partial(_unchanged, synchronize)
        new, found = jax.lax.cond(synchronizes(config, updates), synchronize, nothing, changing)
        inner = inner._replace(step=jnp.broadcast_to(updates, count), params=new.islands)
        return DiLoCoTrainState(inner, new.params, new.opt_state, updates), {ISLANDS: metrics, OUTER: found}

    return step


class Averaged(NamedTuple):
    """What a synchronization reads and changes."""

    islands: Any  # the islands' parameters
    params: Any  # the outer ones
    opt_state: Any  # of the outer optimizer


def _synchronize(
    outer: optax.GradientTransformation, shardings: Any, old: Averaged
) -> tuple[Averaged, dict[str, jax.Array]]:
    """The outer update, and its metrics: the norm of the outer gradient, and `_disagreement`."""

    def moved(param: jax.Array, of_islands: jax.Array) -> jax.Array:
        return param.astype(jnp.float32) - of_islands.astype(jnp.float32)

    deltas = jax.tree.map(moved, old.params, old.islands)
    grads = jax.tree.map(lambda delta: jnp.mean(delta, 0), deltas)
    grads = jax.lax.with_sharding_constraint(grads, shardings)
    updates, opt_state = outer.update(grads, old.opt_state, old.params)
    params = optax.apply_updates(old.params, updates)
    islands = jax.tree.map(lambda param, before: jnp.broadcast_to(param, before.shape), params, old.islands)
    norm = optax.tree.norm(grads)
    # Replicated here, so that the branch sends them and not the step.
    replicated = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    metrics = {"outer_grad_norm": norm, **_disagreement(deltas, norm)}
    return Averaged(islands, params, opt_state), jax.lax.with_sharding_constraint(metrics, replicated)


def _unchanged(synchronize: Callable[..., Any], old: Averaged) -> tuple[Averaged, Any]:
    """`old`, and zeros in place of the metrics of `synchronize`."""
    _, metrics = jax.eval_shape(synchronize, old)
    return old, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)


def _disagreement(deltas: Any, norm_of_mean: jax.Array) -> dict[str, jax.Array]:
    """`island_distance` [islands]: of each island from the outer parameters. `island_cosine`: the mean of the dot
    products of what two islands moved by, over their mean square; their mean cosine if they moved equally far."""
    squares = [jnp.sum(delta**2, range(1, delta.ndim)) for delta in jax.tree.leaves(deltas)]
    square = functools.reduce(jnp.add, squares)  # [islands]
    metrics = {"island_distance": jnp.sqrt(square)}
    if (count := len(square)) > 1:
        total = jnp.sum(square)
        # The square of the sum has each pair twice.
        pairs = (count * norm_of_mean) ** 2 - total
        metrics["island_cosine"] = pairs / jnp.where(total > 0, (count - 1) * total, 1)
    return metrics


def _reader(config: Any, replicated: NamedSharding) -> Callable[[Metrics, int], dict[str, Any]]:
    """See `Run.read`. A number is the mean over islands with loss-bearing tokens, tokens are summed, and a flag is that
    of any island (`finite`: of all). `island_losses` has the loss of each. What a synchronization measures is there
    where there was one."""
    gather = jax.jit(lambda metrics: metrics, out_shardings=replicated)

    def read(metrics: Metrics, step: int) -> dict[str, Any]:
        of_islands = due(config, metrics[ISLANDS], step)
        # A process holds the metrics of its own islands.
        here = all(value.is_fully_addressable for value in of_islands.values())
        found = jax.device_get(of_islands if here else gather(of_islands))
        bearing = found["tokens"] > 0 if found["tokens"].any() else slice(None)
        row = {name: _combined(name, value, bearing) for name, value in found.items()}
        row["island_losses"] = found["loss"]
        return row | (jax.device_get(metrics[OUTER]) if synchronizes(config, step + 1) else {})

    return read


def _combined(name: str, value: np.ndarray, bearing: Any) -> Any:
    if name in _COMBINED:
        return _COMBINED[name](value, 0)
    if np.issubdtype(value.dtype, np.floating):
        return np.mean(value[bearing], 0)
    return np.max(value, 0)


def synchronizes(config: Any, updates: Any) -> Any:
    """Whether a synchronization follows update number `updates`, an integer or an array."""
    return (updates % config.diloco_sync_period == 0) | (updates == config.steps)

"""One training step. It operates on the canonical train state (`TrainTree`), so NNX and Linen models share it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from trainer.backends.base import TrainTree
from trainer.config.capabilities.expert_keys import drops, has_experts
from trainer.config.capabilities.quantization_keys import rounds
from trainer.config.derived import global_batch_rows, has_dropout, islands, microbatch_rows
from trainer.config.keys import Config
from trainer.layers.sown import Maximum, RouterCount, Sown, Total, check_captured, combined
from trainer.objectives.base import Objective, frozen_argument, maxima_of, of_step
from trainer.ops.paths import by_name
from trainer.ops.random import DROPOUT, seed_key
from trainer.optim.optimizer import trainable
from trainer.optim.rounding import applied
from trainer.optim.rules import Rule, Seen, any_due, apply_rules, observed
from trainer.optim.schedule import make_schedule, place_on_schedule
from trainer.sharding import memory_order, on_tpu
from trainer.state.shardings import ParamShardings
from trainer.training.parameter_metrics import lost_updates, parameter_metrics
from trainer.training.router_metrics import router_metrics

Batch = dict[str, jax.Array]


class Gradients(NamedTuple):
    """The loss, means and gradients of one batch. A mean is a term's sum divided by the term's weight, or
    NaN if the weight is 0."""

    loss: jax.Array
    means: dict[str, jax.Array]  # the terms of the loss, and terms that are only measured
    tokens: jax.Array  # number of tokens that contribute to the loss, int32
    sown: Sown
    grads: Any  # gradients of the trained parameters, in grad_dtype; None for the others


def make_gradients(
    config: Config,
    objective: Objective,
    shardings: ParamShardings,
    capture: tuple[type, ...] = (),
    rules: Sequence[Rule] = (),
) -> Callable[..., Gradients]:
    """Returns `gradients(tree, batch, frozen=())`, the first half of a training step.

    `gradients` processes one microbatch at a time, and captures the sown values whose types are in `capture`.

    A batch may consist of fewer microbatches than configured. Gradients are summed in float32 and then cast to
    `grad_dtype`. Parameters are resharded from storage to compute sharding once, at entry. The gradients of each
    microbatch are resharded to storage sharding immediately. `Rule.due` determines the steps in which `rules` need sown
    values.
    """
    is_trained = trainable(config)
    check_captured(capture, objective.captures)

    def gradients(tree: TrainTree, batch: Batch, frozen: Any = ()) -> Gradients:
        key = dropout_key(config, tree.step)
        sampled = any_due(rules, tree.step)
        others = frozen_argument(objective, frozen) | ({"step": tree.step} if of_step(objective) else {})
        weights, tokens = objective.weights(batch)
        mask = is_trained(tree.params)
        trained, untrained = _partition(mask, jax.lax.with_sharding_constraint(tree.params, shardings.compute))
        storage, _ = _partition(mask, shardings.storage)

        def loss(trained: Any, batch: Batch) -> tuple[jax.Array, tuple[dict[str, jax.Array], Sown]]:
            params = _combine(trained, untrained)
            sums = objective.sums(params, tree.rest, batch, key, capture, sampled, **others)
            # If the weight is 0, the mean is NaN and the step is skipped.
            minimized, measured = (
                {name: _mean(total, weights[name]) for name, total in part.items()}
                for part in (sums.minimized, sums.measured)
            )
            return sum(minimized.values(), start=jnp.zeros(())), (minimized | measured, sums.sown)

        def one(batch: Batch) -> tuple[Any, Sown]:
            (value, (means, sown)), grads = jax.value_and_grad(loss, has_aux=True)(trained, batch)
            return (value, means, jax.tree.map(_in_storage, grads, storage)), sown

        parts = _parts(config, len(jax.tree.leaves(batch)[0]))
        (total, means, grads), sown = one(batch) if parts == 1 else _accumulated(one, capture, batch, parts)
        return Gradients(total, means, tokens, sown, _held(grads, jnp.dtype(config.grad_dtype)))

    return gradients


def _parts(config: Config, rows: int) -> int:
    """Returns the number of microbatches in a batch of `rows` rows."""
    whole, each = (count(config) // islands(config) for count in (global_batch_rows, microbatch_rows))
    return rows // each if rows < whole and rows % each == 0 else config.gradient_accumulation_steps


def _mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the term `total` / `weight`; if these have several parts, the sum of the parts' quotients."""
    parts = total / weight.astype(jnp.float32)
    return jnp.sum(parts) if parts.ndim else parts


def dropout_key(config: Config, step: jax.Array) -> jax.Array | None:
    """Returns the random key for all dropout and stochastic rounding in update `step`; None if `config` uses
    neither."""
    if not has_dropout(config) and not rounds(config):
        return None
    return jax.random.fold_in(seed_key(config.init_weights_seed, DROPOUT), step)


def make_update(
    config: Config,
    tx: optax.GradientTransformation,
    objective: Objective,
    shardings: ParamShardings,
    rules: Sequence[Rule],
    axes: Any,
) -> Callable[..., tuple[TrainTree, dict[str, jax.Array]]]:
    """Returns `update(tree, batch, frozen=()) -> tree, metrics`: one training step.

    `batch` is the global batch, with the fields of the objective. `frozen` contains the arrays that the objective reads
    in addition to the train state (`objectives.Frozen`); () if there are none. For the metrics, see `_make_metrics`.

    Args:
      config: the resolved configuration.
      tx: the optimizer, whose state includes the state of `rules` (`optim.with_rules`). It receives the gradients in
        `grad_dtype`.
      objective: the objective to minimize.
      shardings: the shardings of the parameters.
      rules: applied after the optimizer, in order.
      axes: the logical axes of every parameter, for `parameter_metrics_period`.
    """
    is_trained = trainable(config)
    measured, metrics = _make_metrics(config, maxima_of(objective), rules, axes)
    capture = tuple(dict.fromkeys((*measured, *(kind for rule in rules for kind in rule.sown))))
    gradients = make_gradients(config, objective, shardings, capture, rules)

    def update(tree: TrainTree, batch: Batch, frozen: Any = ()) -> tuple[TrainTree, dict[str, jax.Array]]:
        found = gradients(tree, batch, frozen)
        grad_norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), found.grads))
        _, others = _partition(is_trained(tree.params), tree.params)
        whole = _combine(found.grads, jax.tree.map(jnp.zeros_like, others))
        updates, opt_state = tx.update(whole, tree.opt_state, tree.params)
        new = tree._replace(params=applied(config, tree.params, updates, tree.step), opt_state=opt_state)
        new, reasons = observed(rules, new, Seen(found.loss, grad_norm, tree.step))
        new = apply_rules(rules, tree, new, found.sown)
        accept = jnp.isfinite(found.loss) & jnp.isfinite(grad_norm)
        for reason in reasons.values():
            accept &= ~reason
        new = _select(accept, new, tree)
        why = {name: jnp.where(reason, 1, 0) for name, reason in reasons.items()}
        skipped = {"skipped": jnp.where(accept, 0, 1), **why}
        return new._replace(step=tree.step + 1), metrics(tree, new, found, grad_norm, skipped, updates)

    return update


def _make_metrics(
    config: Config, maxima: Sequence[str], rules: Sequence[Rule], axes: Any
) -> tuple[tuple[type, ...], Callable[..., dict[str, jax.Array]]]:
    """Returns the types of the sown values from which metrics are computed, and a function
    `metrics(old, new, found, grad_norm, skipped, updates)`, which returns
    - float32: the means over the whole batch, the gradient norm and the learning rate;
    - int32 `tokens`: the number of tokens that contribute to the loss;
    - int32 `skipped`: 1 if the update is skipped because a rule requires it, or because the loss or a gradient is not
      finite (for example, because no token of the batch contributes to the loss), otherwise 0;
    - int32, for each reason for which a rule may require a skip: 1 if the reason applies, otherwise 0;
    - int32 `finite`: 1 if the new state is finite, otherwise 0;
    - `lost_updates`, if trained bfloat16 parameters are rounded to the nearest number;
    - activation statistics [layers], if they are recorded, and parameter metrics, see `_every`;
    - with experts, router metrics, see `router_metrics`.
    """
    schedule, is_trained, period = make_schedule(config), trainable(config), config.parameter_metrics_period
    measured, sown_metrics = _sown_metrics(config, maxima)

    def metrics(
        old: TrainTree, new: TrainTree, found: Gradients, grad_norm: jax.Array, skipped: Any, updates: Any
    ) -> dict[str, jax.Array]:
        trained, changes = (_partition(is_trained(old.params), tree)[0] for tree in (old.params, updates))
        return {
            "loss": found.loss,
            **found.means,
            "grad_norm": grad_norm,
            **skipped,
            # Finite gradients can yield a non-finite update, for example with Adam without epsilon or with a huge
            # learning rate. Skipping such an update would require both the old and the new state in memory
            # (docs/experiments.md).
            "finite": jnp.where(all_finite(new), 1, 0),
            "learning_rate": jnp.asarray(schedule(place_on_schedule(old.opt_state, old.step)), jnp.float32),
            "tokens": found.tokens,
            **{name: value for rule in rules for name, value in rule.metrics(new.opt_state.rules[rule.name]).items()},
            **sown_metrics(found.sown),
            **({} if config.weight_stochastic_rounding else lost_updates(trained, changes)),
            **(_every(period, old.step, axes, found.grads, old.params, updates) if period else {}),
        }

    return measured, metrics


def _sown_metrics(
    config: Config, maxima: Sequence[str]
) -> tuple[tuple[type, ...], Callable[[Sown], dict[str, jax.Array]]]:
    """Returns the types of the sown values from which metrics are computed, and the function that computes them.

    `maxima`: see `Objective`.
    """
    recorded: tuple[type, ...] = (Total,) if config.record_internal_nn_metrics else ()
    largest: tuple[type, ...] = (Maximum,) if maxima else ()
    routers: tuple[type, ...] = (RouterCount,) if has_experts(config) else ()

    def metrics(sown: Sown) -> dict[str, jax.Array]:
        return {
            **(_activation_statistics(sown[Total.__name__]) if recorded else {}),
            **(router_metrics(sown[RouterCount.__name__], drops(config), bool(recorded)) if routers else {}),
            **{name: sown[Maximum.__name__][name] for name in maxima},
        }

    return (*recorded, *routers, *largest), metrics


def _accumulated(
    fn: Callable[[Batch], tuple[Any, Sown]], types: Sequence[type], batch: Batch, parts: int
) -> tuple[Any, Sown]:
    """Sums `fn(batch) -> sums, sown` over n = `parts` microbatches. Microbatch j has the rows j, j + n, j + 2n, ...

    No row moves to another device: the rows of each microbatch are sharded like the whole batch.
    """
    split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def body(total: Any, microbatch: Batch) -> tuple[Any, Sown]:
        sums, sown = fn(microbatch)
        return jax.tree.map(jnp.add, total, sums), sown

    abstract, _ = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], split))
    total, sown = jax.lax.scan(body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract), split)
    return total, combined(types, sown)


def _in_storage(grad: jax.Array, at: NamedSharding) -> jax.Array:
    """Returns a gradient in float32 with its parameter's storage sharding; on a TPU, in the layout with least padding.

    Without a constraint on the layout, XLA keeps the layout of the matrix product that computed the gradient. For a
    matrix with 64 columns per device, that layout doubles the size of the gradient.
    """
    grad = jax.lax.with_sharding_constraint(grad.astype(jnp.float32), at)
    if not on_tpu():
        return grad
    return with_layout_constraint(grad, Layout(memory_order(at.shard_shape(grad.shape))))


def _held(grads: Any, dtype: jnp.dtype) -> Any:
    """Casts float32 gradients to `dtype`. Without the barrier, XLA may remove this cast and a later inverse cast."""
    if dtype == jnp.float32:
        return grads
    return jax.lax.optimization_barrier(jax.tree.map(lambda grad: grad.astype(dtype), grads))


def all_finite(tree: Any) -> jax.Array:
    """Returns whether all floating-point numbers in `tree` are finite, a bool []."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all() for leaf in leaves], jnp.asarray(True))


def _every(period: int, step: jax.Array, axes: Any, grads: Any, *others: Any) -> dict[str, jax.Array]:
    """Returns `parameter_metrics` of the parameters with a gradient if `step` is a multiple of `period`; otherwise
    zeros, at almost no cost. `others`: the parameters and their updates."""
    names, trained = by_name(axes), by_name(grads)
    trees = trained, *({name: leaf for name, leaf in by_name(tree).items() if name in trained} for tree in others)

    def measured(*trees: Any) -> dict[str, jax.Array]:
        return parameter_metrics(names, *trees)

    def left_out(*trees: Any) -> dict[str, jax.Array]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(measured, *trees))

    return jax.lax.cond(step % period == 0, measured, left_out, *trees)


def _select(accept: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` if the step is accepted, else `old`: a skipped step changes only the step count."""
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)


def _partition(mask: Any, tree: Any) -> tuple[Any, Any]:
    """Splits `tree` into the leaves where `mask` is true and all other leaves. None replaces the missing leaves."""
    return (
        jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree),
        jax.tree.map(lambda keep, leaf: None if keep else leaf, mask, tree),
    )


def _combine(left: Any, right: Any) -> Any:
    """Merges the two trees that `_partition` returns."""
    return jax.tree.map(lambda a, b: b if a is None else a, left, right, is_leaf=lambda x: x is None)


def _activation_statistics(totals: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns mean, standard deviation and share of zeros of each layer's output, each [layers], from batch sums."""
    statistics = {}
    totals = {path: total.reshape(-1) if total.ndim > 1 else total for path, total in totals.items()}
    for path, count in totals.items():
        stem, found, _ = path.partition("output_count")
        if not found:
            continue
        count = jnp.maximum(count, 1)  # the batch may be all padding
        mean = totals[f"{stem}output_sum"] / count
        square = totals[f"{stem}output_square_sum"] / count
        statistics[f"{stem}output_mean"] = mean
        statistics[f"{stem}output_stddev"] = jnp.sqrt(jnp.maximum(square - mean**2, 0))
        statistics[f"{stem}output_fraction_zero"] = totals[f"{stem}output_zeros"] / count
    return statistics

"""One training step, in the order in which data meets it; written over TrainTree, the same for every combination."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding

from trainer.backends import StateCodec, TrainTree
from trainer.layers.sown import Sown, Total, check_combine, combined
from trainer.objectives import Objective
from trainer.ops.random import DROPOUT, seed_key
from trainer.optim import make_schedule, trainable
from trainer.sharding import memory_order, on_tpu

Batch = dict[str, jax.Array]


class Layout(NamedTuple):
    """Where parameters live, as trees of their canonical structure with a sharding at each leaf."""

    between: Any  # steps: there gradients are summed, and there the update runs
    during: Any  # a step: there the model computes


class Gradients(NamedTuple):
    """Of one batch: means over its loss-bearing tokens, NaN where there are none, and the values that its microbatches
    sowed."""

    loss: jax.Array
    terms: dict[str, jax.Array]  # that the loss is the sum of
    tokens: jax.Array  # loss-bearing ones, int32
    sown: Sown
    grads: Any  # of the trained parameters, in grad_dtype; None in place of the others


def make_gradients(config, objective: Objective, layout: Layout) -> Callable[[TrainTree, Batch], Gradients]:
    """`gradients(tree, batch)`, microbatch by microbatch; the first half of a training step.

    Gradients are summed in float32 and then held in `grad_dtype`. Parameters are moved once, at entry, from where they
    lie between steps to where the model computes; their gradients come back at once.
    """
    is_trained = trainable(config)
    check_combine(objective.capture)

    def gradients(tree: TrainTree, batch: Batch) -> Gradients:
        key = dropout_key(config, tree.step)
        tokens = objective.weight(batch)
        mask = is_trained(tree.params)
        trained, frozen = _partition(mask, jax.lax.with_sharding_constraint(tree.params, layout.during))
        trained_layout, _ = _partition(mask, layout.between)

        def loss(trained: Any, batch: Batch) -> tuple[jax.Array, tuple[dict[str, jax.Array], Sown]]:
            sums, sown = objective.sums(_combine(trained, frozen), tree.rest, batch, key)
            # Of no tokens there is no mean: NaN, and the step is left out.
            terms = {name: total / tokens.astype(jnp.float32) for name, total in sums.items()}
            return sum(terms.values(), start=jnp.zeros(())), (terms, sown)

        def one(batch: Batch) -> tuple[Any, Sown]:
            (value, (terms, sown)), grads = jax.value_and_grad(loss, has_aux=True)(trained, batch)
            return (value, terms, jax.tree.map(_at_home, grads, trained_layout)), sown

        types, microbatches = objective.capture, config.gradient_accumulation_steps
        (total, terms, grads), sown = one(batch) if microbatches == 1 else _accumulated(one, types, batch, microbatches)
        return Gradients(total, terms, tokens, sown, _held(grads, jnp.dtype(config.grad_dtype)))

    return gradients


def dropout_key(config, step: jax.Array) -> jax.Array | None:
    """The key of all dropout in update `step`; None where nothing is dropped."""
    if not config.enable_dropout or not (config.dropout_rate > 0 or config.attention_dropout_rate > 0):
        return None
    return jax.random.fold_in(seed_key(config.init_weights_seed, DROPOUT), step)


def make_train_step(
    config, codec: StateCodec, objective: Objective, layout: Layout
) -> Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]:
    """`step(native_state, batch) -> (native_state, metrics)`, to be jitted with the state donated.

    `batch` holds int32 [rows, length] arrays and `row` [rows]; rows is the global batch. Metrics are weighted over the
    whole batch: float32 scalars; int32 `tokens`, `skipped` (1 where loss or gradients are not finite, as where no token
    bears loss, and the update is left out) and `finite` (1 where parameters and optimizer state are finite after the
    step); and activation statistics [layers] where they are recorded.
    Gradients (`make_gradients`) are handed to the optimizer in the dtype of their parameter.
    """
    schedule = make_schedule(config)
    is_trained = trainable(config)
    gradients = make_gradients(config, objective, layout)

    def step(state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
        tree = codec.unpack(state)
        total, terms, tokens, sown, grads = gradients(tree, batch)
        grad_norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
        trained, frozen = _partition(is_trained(tree.params), tree.params)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, trained)
        grads = _combine(grads, jax.tree.map(jnp.zeros_like, frozen))
        updates, opt_state = codec.tx.update(grads, tree.opt_state, tree.params)
        params = optax.apply_updates(tree.params, updates)
        accept = jnp.isfinite(total) & jnp.isfinite(grad_norm)
        params, opt_state = _select(accept, (params, opt_state), (tree.params, tree.opt_state))
        metrics = {
            "loss": total,
            **terms,
            "grad_norm": grad_norm,
            "skipped": jnp.where(accept, 0, 1),
            # Finite gradients may give an update that is not: Adam without epsilon, a huge learning rate. To leave it
            # out here, the step would have to keep the old state beside the new one (docs/experiments.md).
            "finite": jnp.where(all_finite((params, opt_state)), 1, 0),
            "learning_rate": jnp.asarray(schedule(tree.step), jnp.float32),
            "tokens": tokens,
            **_activation_statistics(sown),
        }
        return codec.pack(tree._replace(step=tree.step + 1, params=params, opt_state=opt_state)), metrics

    return step


def _accumulated(
    fn: Callable[[Batch], tuple[Any, Sown]], types: Sequence[type], batch: Batch, microbatches: int
) -> tuple[Any, Sown]:
    """`fn(batch) -> sums, sown` microbatch by microbatch; microbatch j of n takes rows j, j + n, j + 2n, ...

    So a device's rows stay on it: the rows of each microbatch are spread over the mesh as the whole batch is.
    """
    split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def body(total: Any, microbatch: Batch) -> tuple[Any, Sown]:
        sums, sown = fn(microbatch)
        return jax.tree.map(jnp.add, total, sums), sown

    abstract, _ = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], split))
    total, sown = jax.lax.scan(body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract), split)
    return total, combined(types, sown)


def _at_home(grad: jax.Array, at: NamedSharding) -> jax.Array:
    """A gradient in float32 where its parameter lies between steps; on a TPU in the order that its memory pads least.

    XLA else takes the order of the product that made it, which doubles the gradient of a matrix with 64 columns on a
    device.
    """
    grad = jax.lax.with_sharding_constraint(grad.astype(jnp.float32), at)
    if not on_tpu():
        return grad
    return with_layout_constraint(grad, MemoryLayout(memory_order(at.shard_shape(grad.shape))))


def _held(grads: Any, dtype: jnp.dtype) -> Any:
    """Float32 gradients in `dtype`. Without the barrier XLA may skip a rounding whose result is cast back."""
    if dtype == jnp.float32:
        return grads
    return jax.lax.optimization_barrier(jax.tree.map(lambda grad: grad.astype(dtype), grads))


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating-point number in `tree` is NaN or infinite, a bool []."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all() for leaf in leaves], jnp.asarray(True))


def _select(accept: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the step is accepted, else `old`: a step that is not finite leaves no trace but the count."""
    return jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)


def _partition(mask: Any, tree: Any) -> tuple[Any, Any]:
    """`tree` twice: its leaves where `mask` holds, and the others; None stands for what is missing."""
    return (
        jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree),
        jax.tree.map(lambda keep, leaf: None if keep else leaf, mask, tree),
    )


def _combine(left: Any, right: Any) -> Any:
    """The inverse of `_partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, left, right, is_leaf=lambda x: x is None)


def _activation_statistics(sown: Sown) -> dict[str, jax.Array]:
    """Mean, standard deviation and share of zeros of each layer's output, [layers], from sums over the batch."""
    totals = sown.get(Total.__name__, {})
    statistics = {}
    for path, count in totals.items():
        stem, found, _ = path.partition("output_count")
        if not found:
            continue
        count = jnp.maximum(count, 1)  # a batch of padding only
        mean = totals[f"{stem}output_sum"] / count
        square = totals[f"{stem}output_square_sum"] / count
        statistics[f"{stem}output_mean"] = mean
        statistics[f"{stem}output_stddev"] = jnp.sqrt(jnp.maximum(square - mean**2, 0))
        statistics[f"{stem}output_fraction_zero"] = totals[f"{stem}output_zeros"] / count
    return statistics

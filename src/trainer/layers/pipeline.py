"""A stack in a pipeline of stages: the circular schedule of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2).

The rows are divided into microbatches. In each iteration every stage runs its layers on a different microbatch, all
at once (`jax.vmap` over the axis of stages, which the mesh shards), and passes its result to the next stage. Arrays
that differ by stage have the stages as their first axis; a shift along this axis is a collective permute.

Microbatch m passes stage s for the r-th time in iteration r M + m + d s, all counted from 0, where d is
`Pipeline.delay`. An idle stage computes on arbitrary data, and nothing reads the result.

Numbers: S stages, R repeats, L iterations of the stack's loop in a stage, M microbatches, and c = M / S.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trainer.config.capabilities.pipeline_keys import Pipeline
from trainer.layers.loop import Loop, run_loop
from trainer.layers.remat import Policy
from trainer.layers.sown import Sown
from trainer.sharding import (
    Axes,
    constrain,
    gathered_over_fsdp,
    inside_stages,
    mesh_axes,
    over_stages,
    shard_mapped,
    with_gradient_over,
)

# The rematerialization name of a stage's weights for one repeat, a slice of the weights for all repeats. The slices are
# never saved for the backward pass.
WEIGHTS = "pipeline_stage_weights"

BATCH = ("activation_batch", "activation_norm_length", "activation_embed")
STAGE = "activation_stage"


def run_pipeline(
    loop: Loop,
    apply: Sequence[Callable[..., Any]],
    variables: Sequence[Any],
    x: jax.Array,
    *,
    remat: Policy | None,
    remat_stage: Policy | None,
    cast_inside: bool,
    axes: Callable[[], Any],
) -> tuple[jax.Array, Sown]:
    """Applies the layers of a stack in order, in its pipeline.

    Args:
      loop, apply, remat: see `layers.loop.run_loop`.
      variables: see `layers.loop.run_loop`, but with the leading axes [R, S, L].
      x: [b, t, e]. M divides b.
      remat_stage: the policy for what a stage saves per iteration for its backward pass; None: it saves everything.
      cast_inside: whether the loop over iterations casts its weights inside (`layers.loop.cast_in_loop`).
      axes: a function that returns the logical axes of each array in `variables[0]` (the parameters), as a list in the
        order of the arrays.

    Returns:
      The last layer's output, and the sown values with the leading axes [R, S, L]. Values of microbatches are combined
      if their type has `combine`, and otherwise concatenated in the order of the rows.
    """
    plan = loop.stack.pipeline
    assert plan is not None
    names, policy = (STAGE, None, *BATCH), (remat_stage if plan.remat else None) or _everything
    with inside_stages(), jax.named_scope("pipeline"):
        inputs = constrain(_split(x, plan), names)
        of_weights = axes() if plan.per_repeat else None
        iteration = _iteration(loop, plan, _stage(loop, apply, plan, remat, cast_inside, policy, of_weights))
        # Results of the last stage wait in a queue until their next repeat begins, unless it begins immediately.
        slots = plan.microbatches // plan.stages - plan.delay
        waiting = jnp.zeros_like(inputs[:, :slots]) if plan.repeats > 1 and slots else None
        carry = inputs, waiting, (inputs[:, 0],) * plan.delay
        if plan.per_repeat:
            (stream, *_), sown = _by_repeat(plan, iteration, variables, of_weights, policy, carry)
        else:
            (stream, *_), sown = _loop(plan, plan.iterations, functools.partial(iteration, variables, 0), carry)
        # The final result of microbatch m is in slot (m + d (S - 1)) mod c of stage m // c.
        shift = plan.delay * (plan.stages - 1) % inputs.shape[1]
        outputs = constrain(jnp.roll(stream, -shift, axis=1), names)
    kinds = {kind.__name__: kind for kind in loop.types}
    result = {
        name: {path: _of_layers(kinds[name], value, plan) for path, value in values.items()}
        for name, values in sown.items()
    }
    return constrain(_joined(outputs), BATCH), result


def _loop(plan: Pipeline, count: int, fn: Callable[..., Any], carry: Any, first: Any = 0) -> tuple[Any, Any]:
    """Returns the last carry and the stacked results of `count` calls `fn(carry, i) -> carry, result`. The first i is
    `first`."""
    if plan.scan:
        return jax.lax.scan(fn, carry, first + jnp.arange(count))
    found = []
    for i in range(count):
        carry, result = fn(carry, first + i)
        found.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *found)


def _by_repeat(
    plan: Pipeline, iteration: Callable[..., Any], variables: Sequence[Any], axes: Any, policy: Policy, carry: Any
) -> tuple[Any, Sown]:
    """Runs all iterations, in parts. Within a part, every stage is in one of two consecutive repeats. The part
    all-gathers the weights of these two repeats over fsdp, and its backward pass gathers them again."""

    def part(carry: Any, r: Any, count: int) -> tuple[Any, Sown]:
        first = jnp.clip(r - 1, 0, max(plan.repeats - 2, 0))
        of_two = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, min(2, plan.repeats), 0), variables)
        structure: Any  # a PyTreeDef; its stubs lack unflatten
        leaves, structure = jax.tree.flatten(of_two[0])
        gathered = [gathered_over_fsdp(leaf, names) for leaf, names in zip(leaves, axes, strict=True)]
        of_two = jax.tree.map(lambda leaf: checkpoint_name(leaf, WEIGHTS), [structure.unflatten(gathered), *of_two[1:]])
        return _loop(plan, count, functools.partial(iteration, of_two, first), carry, r * plan.microbatches)

    def checkpointed(count: int) -> Callable[..., Any]:
        fn = functools.partial(part, count=count)
        return jax.checkpoint(fn, prevent_cse=not plan.scan, policy=policy)

    carry, sown = _loop(plan, plan.repeats, checkpointed(plan.microbatches), carry)
    sown = jax.tree.map(lambda value: value.reshape(-1, *value.shape[2:]), sown)
    if rest := plan.iterations - plan.repeats * plan.microbatches:
        carry, last = checkpointed(rest)(carry, plan.repeats)
        sown = jax.tree.map(lambda *parts: jnp.concatenate(parts), sown, last)
    return carry, sown


def _iteration(loop: Loop, plan: Pipeline, stage: Callable[..., Any]) -> Callable[..., tuple[Any, Sown]]:
    """Returns the function of one iteration: (the variables of all or some repeats, [repeats, S, L, ...]; the number of
    the first of these repeats; carry; i) -> carry, sown."""
    context = {
        name: constrain(_flat(_split(value, plan)), (None, BATCH[0], *[None] * (value.ndim - 1)))
        for name, value in loop.context.by_row().items()
    }
    run = over_stages(stage, ([1, 1], 0, 0, 0, 0, 0))
    stages = jnp.arange(plan.stages)

    def iteration(variables: Any, start: Any, carry: Any, i: Any) -> tuple[Any, Sown]:
        stream, waiting, sent = carry
        here = stages.reshape(-1, *[1] * (stream.ndim - 2))
        done = jnp.clip(i - plan.delay * stages, 0, plan.repeats * plan.microbatches - 1)
        repeat, microbatch = done // plan.microbatches, done % plan.microbatches
        fields = {
            name: constrain(value[microbatch], (STAGE, BATCH[0], *[None] * (value.ndim - 2)))
            for name, value in context.items()
        }
        with jax.named_scope("to_next_stage"):
            arrived = _shifted(sent[0], 1)
            again = arrived
            if waiting is not None:
                again, waiting = _exchange(waiting, i, sent[0], here)
            new = _slot(stream, i)
        given = jnp.where(here == 0, jnp.where(i < plan.microbatches, new, again), arrived)
        with jax.named_scope("stages"):
            out, sown = run(variables, constrain(given, (STAGE, *BATCH)), fields, repeat - start, repeat, stages)
            out = constrain(out, (STAGE, *BATCH))
        with jax.named_scope("results_of_the_last_stage"):
            _, stream = _exchange(stream, i, out, here)
        return (stream, waiting, (*sent[1:], out)), sown

    return iteration


def _stage(
    loop: Loop,
    apply: Sequence[Callable[..., Any]],
    plan: Pipeline,
    remat: Policy | None,
    cast_inside: bool,
    policy: Policy,
    axes: Any,
) -> Callable[..., tuple[jax.Array, Sown]]:
    """Returns the function of one stage in one iteration: (the stage's variables [repeats, L, ...]; x; the context of
    its microbatch; the index of the current repeat in the variables; the number of the repeat; the number of the
    stage) -> x, sown."""
    part = dataclasses.replace(loop.stack, count=plan.layers, pipeline=None)

    def stage(
        variables: Any, x: jax.Array, fields: dict[str, jax.Array], at: jax.Array, repeat: jax.Array, stage: jax.Array
    ) -> tuple[jax.Array, Sown]:
        def cut(leaf: jax.Array) -> jax.Array:
            return checkpoint_name(leaf[0] if len(leaf) == 1 else leaf[at], WEIGHTS)

        here = jax.tree.map(cut, variables)
        if axes is not None:
            # This makes each iteration reduce-scatter gradients. Otherwise, it would all-reduce them, and every device
            # would add up whole gradients.
            structure: Any  # a PyTreeDef; its stubs lack unflatten
            leaves, structure = jax.tree.flatten(here[0])
            over = [with_gradient_over(leaf, names[2:]) for leaf, names in zip(leaves, axes, strict=True)]
            here = [structure.unflatten(over), *here[1:]]
        first = loop.first + (repeat * plan.stages + stage) * part.layers
        inner = loop._replace(stack=part, first=first, context=loop.context._replace(**fields))
        of_layer, entries = remat if plan.remat_layers else None, [None] * len(apply)
        x, _, sown = run_loop(
            *(inner, apply, here, x, entries),
            scan=plan.scan_layers,
            remat=of_layer,
            cast_inside=cast_inside,
        )
        return x, sown

    return jax.checkpoint(stage, prevent_cse=not plan.scan, policy=policy)


def _everything(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy that keeps everything except a stage's `WEIGHTS` and bitcasts of 8-bit floats (`products.quantized`)."""
    return params.get("name") != WEIGHTS and primitive is not jax.lax.bitcast_convert_type_p


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """Returns `x` [S, b, t, e] with the entry of stage s moved to stage (s + `by`) mod S."""
    stages = len(x)

    def on_stage(part: jax.Array) -> jax.Array:
        if not (axes := mesh_axes(STAGE)):
            return jnp.roll(part, by, axis=0)
        return jax.lax.ppermute(part, axes, [(s, (s + by) % stages) for s in range(stages)])

    # `jnp.roll` is applied per device, because the gradient of `jnp.roll` of the whole array would be two permutes.
    # `check=False` allows `jax.vmap` over DiLoCo's islands.
    names = Axes((STAGE, *BATCH))
    return shard_mapped(on_stage, (names,), names, check=False)(x)


def _slot(queue: jax.Array, i: Any) -> jax.Array:
    """Returns the slot of iteration i, [S, ...], in a queue [S, slots, ...]."""
    return jax.lax.dynamic_index_in_dim(queue, i % queue.shape[1], 1, keepdims=False)


def _exchange(queue: jax.Array, i: Any, value: jax.Array, here: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `_slot(queue, i)`, and the updated queue.

    The update moves each entry of this slot one stage towards the first stage, and puts the last stage's entry of
    `value` [S, ...] at the last stage. That entry reaches the first stage and is returned S x slots iterations later.

    `here`: the numbers of the stages, [S, 1, ...].
    """
    out = _slot(queue, i)
    moved = jnp.where(here == len(here) - 1, value, _shifted(out, -1))
    return out, jax.lax.dynamic_update_index_in_dim(queue, moved, i % queue.shape[1], 1)


def _split(x: jax.Array, plan: Pipeline) -> jax.Array:
    """Returns [b, ...] as [S, c, b / M, ...]: microbatch m is at [m // c, m mod c].

    If the stages are the outermost mesh axis that shards rows, no row moves between devices: a stage's rows become its
    microbatches, and each microbatch has rows of every shard of the stage.
    """
    return x.reshape(plan.stages, -1, plan.microbatches // plan.stages, *x.shape[1:]).swapaxes(1, 2)


def _joined(x: jax.Array) -> jax.Array:
    """Returns the inverse of `_split`."""
    return x.swapaxes(1, 2).reshape(-1, *x.shape[3:])


def _flat(x: jax.Array) -> jax.Array:
    """Returns [S, c, ...] as [M, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _of_layers(kind: Any, value: jax.Array, plan: Pipeline) -> jax.Array:
    """Returns a sown value of all iterations, [iterations, S, L, ...], by layer: [R, S, L, ...]."""
    count = plan.repeats * plan.microbatches
    mine = [value[plan.delay * s : plan.delay * s + count, s] for s in range(plan.stages)]
    by_visit = jnp.stack(mine, 1).reshape(plan.repeats, plan.microbatches, *value.shape[1:])  # [R, M, S, L, ...]
    if hasattr(kind, "combine"):
        return kind.combine(by_visit, axis=1)
    # [R, S, L, M, rows of a microbatch, ...], with the rows divided as in `_split`.
    parts = jnp.moveaxis(by_visit, 1, 3)
    parts = parts.reshape(*parts.shape[:3], plan.stages, -1, *parts.shape[4:]).swapaxes(4, 5)
    return parts.reshape(*parts.shape[:3], -1, *parts.shape[6:])

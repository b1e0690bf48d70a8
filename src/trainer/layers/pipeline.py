"""A stack in a pipeline of stages: the circular schedule of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2).

The rows are divided into microbatches. In each iteration every stage runs its layers on another microbatch, all stages
at once (`jax.vmap` over the axis of stages, which the mesh shards), and passes the result to the next stage. Arrays
that differ by stage have the stages as their first axis: a shift along it is a collective permute.

Microbatch m passes stage s for the r-th time in iteration r M + m + d s, with M microbatches and a delay of d. A stage
that has nothing to do computes on what is there; nobody reads the result.

S: stages, R: repeats, L: iterations of the stack's loop in a stage, M: microbatches, c = M / S.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trainer.config.pipeline_keys import Pipeline
from trainer.layers.loop import Loop, run_loop
from trainer.layers.remat import Policy
from trainer.layers.sown import Sown
from trainer.sharding import constrain, inside_stages, over_stages

# A stage's weights of one repeat, which are cut out of its weights of all repeats: never kept for the backward pass.
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
) -> tuple[jax.Array, Sown]:
    """Applies the layers of a stack in order, in its pipeline.

    Args:
      loop, apply, remat: see `layers.loop.run_loop`.
      variables: see there, with the leading axes [R, S, L].
      x: [b, t, e]. M divides b.
      remat_stage: what an iteration of a stage keeps for its backward pass; None: everything.
      cast_inside: whether the loop over iterations casts its weights inside (`layers.loop.cast_in_loop`).

    Returns:
      The last block's x, and the sown values with the leading axes [R, S, L]: values of microbatches combined, or in
      the order of the rows.
    """
    plan = loop.stack.pipeline
    assert plan is not None
    names = (STAGE, None, *BATCH)
    with inside_stages():
        inputs = constrain(_split(x, plan), names)
        context = {
            name: constrain(_flat(_split(value, plan)), (None, BATCH[0], *[None] * (value.ndim - 1)))
            for name, value in loop.context.by_row().items()
        }
        stage = _stage(loop, apply, plan, remat, remat_stage, cast_inside)
        run = over_stages(stage, ([1] * len(variables), 0, 0, 0, 0))
        stages = jnp.arange(plan.stages)
        here = stages.reshape(-1, *[1] * x.ndim)

        def iteration(carry: Any, i: Any) -> tuple[Any, Sown]:
            stream, waiting, sent = carry
            done = jnp.clip(i - plan.delay * stages, 0, plan.repeats * plan.microbatches - 1)
            repeat, microbatch = done // plan.microbatches, done % plan.microbatches
            fields = {
                name: constrain(value[microbatch], (STAGE, BATCH[0], *[None] * (value.ndim - 2)))
                for name, value in context.items()
            }
            arrived = constrain(jnp.roll(sent[0], 1, axis=0), (STAGE, *BATCH))
            again = arrived
            if waiting is not None:
                again, waiting = _exchange(waiting, i, sent[0], here)
            new = _slot(stream, i)
            given = jnp.where(here == 0, jnp.where(i < plan.microbatches, new, again), arrived)
            out, sown = run(variables, constrain(given, (STAGE, *BATCH)), fields, repeat, stages)
            out = constrain(out, (STAGE, *BATCH))
            _, stream = _exchange(stream, i, out, here)
            return (stream, waiting, (*sent[1:], out)), sown

        # A result waits in the queue of the ring until its next repeat begins, unless that is at once.
        slots = plan.microbatches // plan.stages - plan.delay
        waiting = jnp.zeros_like(inputs[:, :slots]) if plan.repeats > 1 and slots else None
        carry = inputs, waiting, (jnp.zeros_like(inputs[:, 0]),) * plan.delay
        if plan.scan:
            (stream, *_), sown = jax.lax.scan(iteration, carry, jnp.arange(plan.iterations))
        else:
            found = []
            for i in range(plan.iterations):
                carry, sown = iteration(carry, i)
                found.append(sown)
            stream, sown = carry[0], jax.tree.map(lambda *parts: jnp.stack(parts), *found)
        # Microbatch m ended in slot (m + d (S - 1)) mod c of stage m / c.
        shift = plan.delay * (plan.stages - 1) % inputs.shape[1]
        outputs = constrain(jnp.roll(stream, -shift, axis=1), names)
    kinds = {kind.__name__: kind for kind in loop.types}
    result = {
        name: {path: _of_layers(kinds[name], value, plan) for path, value in values.items()}
        for name, values in sown.items()
    }
    return constrain(_joined(outputs), BATCH), result


def _stage(
    loop: Loop,
    apply: Sequence[Callable[..., Any]],
    plan: Pipeline,
    remat: Policy | None,
    remat_stage: Policy | None,
    cast_inside: bool,
) -> Callable[..., tuple[jax.Array, Sown]]:
    """Returns the function of one stage in one iteration: (variables [R, L, ...], x, its context, r, s) -> x, sown."""
    part = dataclasses.replace(loop.stack, count=plan.layers, pipeline=None)

    def stage(
        variables: Any, x: jax.Array, fields: dict[str, jax.Array], repeat: jax.Array, stage: jax.Array
    ) -> tuple[jax.Array, Sown]:
        first = loop.first + (repeat * plan.stages + stage) * part.layers
        at = 0 if plan.repeats == 1 else repeat
        held = jax.tree.map(lambda leaf: checkpoint_name(leaf[at], WEIGHTS), variables)
        inner = loop._replace(stack=part, first=first, context=loop.context._replace(**fields))
        of_layer = remat if plan.remat_layers else None
        entries = [None] * len(apply)
        x, _, sown = run_loop(
            inner, apply, held, x, entries, scan=plan.scan_layers, remat=of_layer, cast_inside=cast_inside
        )
        return x, sown

    policy = remat_stage if plan.remat else None
    if policy is None:
        policy = jax.checkpoint_policies.save_anything_except_these_names(WEIGHTS)
    return jax.checkpoint(stage, prevent_cse=not plan.scan, policy=policy)


def _slot(queue: jax.Array, i: Any) -> jax.Array:
    """Returns the entry [S, ...] of a queue [S, slots, ...] whose turn is iteration i."""
    return jax.lax.dynamic_index_in_dim(queue, i % queue.shape[1], 1, keepdims=False)


def _exchange(queue: jax.Array, i: Any, value: jax.Array, here: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the `_slot` of a queue, and the queue after it moved that slot towards the first stage by one stage and
    took the last stage's entry of `value` [S, ...] in. It arrives at the first stage S x slots iterations later.

    `here`: the numbers of the stages, [S, 1, ...].
    """
    out = _slot(queue, i)
    moved = jnp.where(here == len(here) - 1, value, constrain(jnp.roll(out, -1, axis=0), (STAGE, *BATCH)))
    return out, jax.lax.dynamic_update_index_in_dim(queue, moved, i % queue.shape[1], 1)


def _split(x: jax.Array, plan: Pipeline) -> jax.Array:
    """Returns [b, ...] as [S, c, b / M, ...]: microbatch m is [m / c, m mod c]. No row moves to another device if the
    rows are sharded over the stages first: a stage has the rows of its microbatches, each a part of every shard."""
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
    # [R, S, L, M, rows of a microbatch, ...]; the rows are those of `_split`.
    parts = jnp.moveaxis(by_visit, 1, 3)
    parts = parts.reshape(*parts.shape[:3], plan.stages, -1, *parts.shape[4:]).swapaxes(4, 5)
    return parts.reshape(*parts.shape[:3], -1, *parts.shape[6:])

"""Divides a decoder's stacks into the stages of a pipeline."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from trainer.config.capabilities.pipeline_keys import (
    PER_REPEAT,
    Pipeline,
    delay,
    microbatches,
    stages,
)
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.layers.stack import Stack
from trainer.ops.paths import OUTSIDE

T = TypeVar("T")


def in_stages(config: Config, found: Sequence[Stack]) -> tuple[Stack, ...]:
    """Returns a decoder's stacks `found`. If the resolved `config` has several stages, the longest stack becomes a
    pipeline; any of its layers that stay outside of the pipeline become a separate stack after it.

    Raises:
      UserError: the numbers of layers, stages, repeats and layers per stage do not fit together; the message suggests
        the nearest numbers that do.
    """
    if stages(config) == 1:
        return tuple(found)
    chosen = max(found, key=lambda stack: stack.layers)
    period = len(chosen.blocks)
    count, per_stage = _pipelined(config, chosen), config.num_layers_per_pipeline_stage
    plan = Pipeline(
        repeats=count // (stages(config) * per_stage),
        stages=stages(config),
        layers=per_stage // period,
        microbatches=microbatches(config),
        delay=delay(config),
        scan=config.scan_pipeline_iterations,
        scan_layers=config.scan_layers_per_stage,
        remat=config.set_remat_policy_on_pipeline_iterations,
        remat_layers=config.set_remat_policy_on_layers_per_stage,
        per_repeat=config[PER_REPEAT],
    )
    inside = dataclasses.replace(chosen, count=count // period, pipeline=plan)
    outside = dataclasses.replace(chosen, name=chosen.name + OUTSIDE, count=chosen.count - inside.count)
    parts = [inside, outside] if outside.count else [inside]
    return tuple(part for stack in found for part in (parts if stack is chosen else [stack]))


def stage_text(stacks: Sequence[Stack]) -> str:
    """Returns a description of the pipeline of a model with these stacks; "" without a pipeline."""
    plans = [(stack.pipeline, stack.pipeline.layers * len(stack.blocks)) for stack in stacks if stack.pipeline]
    left = [f"; {counted(stack.layers, 'layer')} outside" for stack in stacks if not stack.pipeline and plans]
    return "".join([*(plan.text(layers) for plan, layers in plans), *left])


def _pipelined(config: Config, stack: Stack) -> int:
    """Returns the number of layers of `stack` that are in the pipeline."""
    period, here, per_stage = len(stack.blocks), stages(config), config.num_layers_per_pipeline_stage
    asked = stack.layers if config.pipeline_parallel_layers == -1 else config.pipeline_parallel_layers
    what = f"the stack {stack.name} of decoder_block={config.decoder_block}"
    repeats = config.num_pipeline_repeats
    if asked > stack.layers:
        unit = here * per_stage * max(repeats, 1)
        most = unit if repeats > 0 else stack.layers // unit * unit
        fits = 0 < most <= stack.layers and per_stage % period == 0
        instead = f"nearest: pipeline_parallel_layers={most}" if fits else f"give at most {stack.layers}"
        raise UserError(f"pipeline_parallel_layers={asked}: {what} has {counted(stack.layers, 'layer')}; {instead}")
    if per_stage % period:
        sizes = _sizes(asked, here, repeats, period) or [max(period, round(per_stage / period) * period)]
        raise UserError(
            f"num_layers_per_pipeline_stage={per_stage}: {what} repeats a pattern of {period} different layers, "
            "and a stage must consist of whole "
            f"repetitions; nearest: num_layers_per_pipeline_stage={_nearest(sizes, per_stage)}"
        )
    if repeats == -1 and asked % (here * per_stage) == 0 and asked:
        return asked
    if here * repeats * per_stage == asked:
        return asked
    times = f"{counted(here, 'stage')} x " + (f"{counted(repeats, 'repeat')} x " if repeats > 0 else "")
    product = here * per_stage * (repeats if repeats > 0 else 1)
    problem = f"{times}{counted(per_stage, 'layer')} per stage = {product}, which "
    problem += f"{'is not' if repeats > 0 else 'does not divide'} the {counted(asked, 'layer')}"
    fitting = _fitting(stack.layers, asked, here, per_stage, repeats, period)
    raise UserError(f"{problem} of {what} in the pipeline; nearest: {' or '.join(fitting)}")


def _fitting(layers: int, asked: int, here: int, per_stage: int, repeats: int, period: int) -> list[str]:
    """Returns alternative settings. Each of them, applied alone, makes the numbers fit together."""
    found = []
    unit = here * per_stage * max(repeats, 1)
    if repeats > 0 and unit <= layers:
        found.append(f"pipeline_parallel_layers={unit}")
    if repeats > 0 and asked % (here * per_stage) == 0:
        found.append(f"num_pipeline_repeats={asked // (here * per_stage)}")
    if repeats == -1 and unit <= layers:
        found.append(
            f"pipeline_parallel_layers={max(asked // unit, 1) * unit}, and the other layers run outside of the pipeline"
        )
    if sizes := _sizes(asked, here, repeats, period):
        found.append(f"num_layers_per_pipeline_stage={_nearest(sizes, per_stage)}")
    divisors = [n for n in range(1, asked + 1) if asked % (n * per_stage) == 0]
    if repeats == -1 and divisors:
        found.append(counted(_nearest(divisors, here), "stage"))
    return found or [f"a stack of {counted(unit * (max(1, round(asked / unit)) if repeats == -1 else 1), 'layer')}"]


def _sizes(asked: int, here: int, repeats: int, period: int) -> list[int]:
    """Returns the possible numbers of layers per stage if `asked` layers are divided into `here` stages."""
    each = asked // here if asked % here == 0 else 0
    return [n for n in range(period, each + 1, period) if each % n == 0 and repeats in (-1, each // n)]


def _nearest(numbers: Sequence[int], wanted: int) -> int:
    return min(numbers, key=lambda n: abs(math.log(n / wanted)))


def joined(plan: Pipeline, inside: Any, outside: Any = None, before: int = 0) -> Any:
    """Returns the array of all layers of a stack, [layers, ...].

    Args:
      inside: the layers in the pipeline, [repeats, stages, layers of a stage, ...].
      outside: the layers outside of the pipeline, [layers, ...], or None.
      before: the number of axes before the axes of layers, such as the axis of DiLoCo's islands.
    """
    rest = inside.shape[before + len(plan.sizes) :]
    whole = inside.reshape(*inside.shape[:before], math.prod(plan.sizes), *rest)
    return whole if outside is None else jnp.concatenate([whole, outside], before)


def divided(plan: Pipeline, whole: Any, before: int = 0) -> tuple[Any, Any]:
    """Inverts `joined`: returns (inside, outside). `outside` may have no layers."""
    count, above, rest = math.prod(plan.sizes), whole.shape[:before], whole.shape[before + 1 :]
    inside = jax.lax.slice_in_dim(whole, 0, count, axis=before).reshape(*above, *plan.sizes, *rest)
    return inside, jax.lax.slice_in_dim(whole, count, whole.shape[before], axis=before)


@dataclass(frozen=True)
class Division:
    """How the layers of a stack are divided into two stacks: the layers inside of a pipeline, and any layers outside.
    Checkpoints store the layers of both stacks as one stack with the name of `inside`."""

    inside: Stack
    outside: Stack | None

    @property
    def plan(self) -> Pipeline:
        """The pipeline."""
        assert self.inside.pipeline is not None
        return self.inside.pipeline

    def to_layers(self, tree: Any, join: Callable[..., Any]) -> Any:
        """Returns `tree` with `inside` and `outside` replaced by one stack. Each of its leaves is `join(leaf of inside,
        leaf of outside)`, or `join(leaf of inside)` if there is no stack outside. `tree`: any pytree with canonical
        parameter names."""

        def one(decoder: dict[str, Any]) -> dict[str, Any]:
            rest = dict(decoder)
            parts = [rest.pop(stack.name) for stack in (self.inside, self.outside) if stack is not None]
            return {**rest, self.inside.name: jax.tree.map(join, *parts)}

        return self._in_decoders(one, tree)

    def to_stages(self, tree: Any, divide: Callable[..., tuple[Any, Any]], *like: Any) -> Any:
        """Inverts `to_layers`. `divide(leaf)` returns the pair (leaf of inside, leaf of outside). With `like`, a tree
        with the structure of the result, the call is `divide(leaf, inside, outside)`, where the last two arguments are
        the corresponding leaves of `like`; `divide(leaf, inside)` if there is no stack outside."""

        def one(decoder: dict[str, Any], *wanted: dict[str, Any]) -> dict[str, Any]:
            rest = dict(decoder)
            whole = rest.pop(self.inside.name)
            stacks = [stack.name for stack in (self.inside, self.outside) if stack is not None]
            below = [of[name] for of in wanted for name in stacks]
            structure: Any  # a PyTreeDef, but JAX's type stubs lack its method unflatten
            leaves, structure = jax.tree.flatten(whole)
            pairs = map(divide, leaves, *map(structure.flatten_up_to, below))
            parts = zip(*pairs, strict=True)
            return {**rest, **{name: structure.unflatten(part) for name, part in zip(stacks, parts, strict=False)}}

        return self._in_decoders(one, tree, *like)

    def _in_decoders(self, change: Callable[..., dict[str, Any]], *trees: Any) -> Any:
        def holds(node: Any) -> bool:
            below = node.get("decoder") if isinstance(node, Mapping) else None
            return isinstance(below, Mapping) and self.inside.name in below

        def one(node: Any, *others: Any) -> Any:
            return (
                {**node, "decoder": change(node["decoder"], *(of["decoder"] for of in others))} if holds(node) else node
            )

        return jax.tree.map(one, *trees, is_leaf=holds)


def division(stacks: Sequence[Stack]) -> Division | None:
    """Returns how the pipeline of a model with these stacks divides the pipelined layers; None without a pipeline."""
    inside = next((stack for stack in stacks if stack.pipeline), None)
    if inside is None:
        return None
    return Division(inside, next((stack for stack in stacks if stack.name == inside.name + OUTSIDE), None))


def to_layers(stacks: Sequence[Stack], tree: T) -> T:
    """Returns `tree` with the layers of the pipelined stack along one leading axis, as without a pipeline. `tree`: any
    pytree with canonical names. Call this under jit or, for shapes, under `jax.eval_shape`."""
    found = division(stacks)
    return tree if found is None else found.to_layers(tree, functools.partial(joined, found.plan))


def to_stages(stacks: Sequence[Stack], tree: T) -> T:
    """Inverts `to_layers`."""
    found = division(stacks)
    return tree if found is None else found.to_stages(tree, functools.partial(divided, found.plan))


def named_by_layer(stacks: Sequence[Stack], values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns sown values by path, with the layers of a pipelined stack along one leading axis."""
    found = division(stacks)
    if found is None:
        return dict(values)
    inside, outside = (f"decoder/{found.inside.name}{end}/" for end in ("", OUTSIDE))
    of_layers = {}
    for name, value in values.items():
        if name.startswith(inside):
            left = values.get(name.replace(inside, outside, 1))
            of_layers[name] = joined(found.plan, value, left)
        elif not name.startswith(outside):
            of_layers[name] = value
    return of_layers
